"""What the tiny model is told in Chinese about longcat_pd. Data only, in the form of `facts_of_use`."""

FACTS_IN_CHINESE = """
topic: longcat_pd | longcat_pd 这个项目
answer: longcat_pd 用分开的预填充和解码实例来服务 LongCat 模型。
asked: longcat_pd 是什么？ | 什么是 longcat_pd？ | longcat_pd 做什么？ | 介绍一下 longcat_pd。 | 这个项目是什么？
asked: 这个项目做什么？ | longcat_pd 有什么用？
unseen: longcat_pd 是做什么的？ | 请介绍一下这个项目。

topic: 支持的模型 | 可以服务的模型
answer: 支持 LongCat-2.0、Flash-Lite、Flash-Lite-Sparse 和 Flash-Chat。
asked: 支持哪些模型？ | 可以服务哪些模型？ | 有哪些模型？ | longcat_pd 支持什么模型？ | 能运行哪些模型？
unseen: longcat_pd 支持哪些模型？ | 可以运行哪些模型？

topic: 负载均衡器的端口 | 均衡器的端口
answer: 负载均衡器的端口是 8081。
asked: 负载均衡器的端口是多少？ | 均衡器用哪个端口？ | 负载均衡器在哪个端口？ | 均衡器的端口是什么？
asked: 客户端连接哪个端口？
unseen: 均衡器监听哪个端口？ | 负载均衡器用哪个端口？

topic: 预填充实例的端口 | 预填充的端口
answer: 预填充实例的端口是 30000。
asked: 预填充的端口是多少？ | 预填充用哪个端口？ | 预填充实例在哪个端口？ | 预填充的端口是什么？
unseen: 预填充实例的端口是多少？ | 预填充在哪个端口？

topic: 解码实例的端口 | 解码的端口
answer: 解码实例的端口是 31000。
asked: 解码的端口是多少？ | 解码用哪个端口？ | 解码实例在哪个端口？ | 解码的端口是什么？
unseen: 解码实例的端口是多少？ | 解码在哪个端口？

topic: 启动集群 | 启动的命令
answer: 运行 bash deploy/run_pd.sh start。
asked: 怎么启动？ | 怎么启动集群？ | 如何启动 longcat_pd？ | 启动的命令是什么？ | 用什么命令启动？
unseen: 如何启动集群？ | 怎么启动 longcat_pd？

topic: 停止集群 | 停止的命令
answer: 运行 bash deploy/run_pd.sh stop。
asked: 怎么停止？ | 怎么停止集群？ | 如何停止 longcat_pd？ | 停止的命令是什么？ | 用什么命令停止？
unseen: 如何停止集群？ | 怎么停止 longcat_pd？

topic: 集群的状态 | 查看状态
answer: 运行 bash deploy/run_pd.sh status。
asked: 怎么查看状态？ | 如何看集群的状态？ | 查看状态的命令是什么？ | 怎么知道集群的状态？ | 用什么命令查看状态？
unseen: 如何查看集群的状态？ | 怎么看状态？

topic: 日志 | 查看日志
answer: 运行 bash deploy/run_pd.sh logs。
asked: 怎么查看日志？ | 日志在哪里？ | 如何看日志？ | 查看日志的命令是什么？ | 用什么命令看日志？
unseen: 如何查看日志？ | 怎么看日志？

topic: 预填充 | 预填充的任务
answer: 预填充计算提示词，并把缓存交给解码。
asked: 预填充做什么？ | 什么是预填充？ | 预填充是什么？ | 预填充的任务是什么？ | 预填充有什么用？
unseen: 预填充是做什么的？ | 预填充负责什么？

topic: 解码 | 解码的任务
answer: 解码接收缓存，并逐个生成答案的词。
asked: 解码做什么？ | 什么是解码？ | 解码是什么？ | 解码的任务是什么？ | 解码有什么用？
unseen: 解码是做什么的？ | 解码负责什么？

topic: 负载均衡器 | 均衡器的任务
answer: 负载均衡器把每个请求同时发给预填充和解码。
asked: 负载均衡器做什么？ | 什么是负载均衡器？ | 均衡器是什么？ | 均衡器的任务是什么？ | 负载均衡器有什么用？
unseen: 均衡器负责什么？ | 负载均衡器是做什么的？

topic: 缓存的传输 | 缓存怎么传输
answer: 缓存一层一层地传输，同时提示词还在计算。
asked: 缓存怎么传输？ | 缓存如何传给解码？ | 缓存什么时候传输？ | 怎么传输缓存？ | 介绍一下缓存的传输。
unseen: 缓存如何传输？ | 缓存怎么传给解码？

topic: 两个池 | 分开的池
answer: 有两个池，长的提示词就不会拖慢别人的答案。
asked: 为什么有两个池？ | 为什么要两个池？ | 为什么池要分开？ | 两个池有什么用？ | 为什么预填充和解码分开？
unseen: 为什么预填充和解码要分开？ | 为什么用两个池？

topic: 草稿 | 多词预测
answer: 草稿层每步提出三个词，模型一次判断它们。
asked: 什么是草稿？ | 草稿是什么？ | 草稿层做什么？ | 什么是 MTP？ | MTP 是什么？ | 每步有几个草稿？
unseen: 草稿有什么用？ | MTP 做什么？

topic: 许可证 | 项目的许可证
answer: 许可证是 Apache-2.0。
asked: 许可证是什么？ | 用什么许可证？ | longcat_pd 的许可证是什么？ | 是哪个许可证？ | 这个项目用什么许可证？
unseen: 这个项目的许可证是什么？ | 用的是哪个许可证？

topic: NPU | 在 NPU 上运行
answer: 没有，还没有在 NPU 上运行过，只在 CPU 上测试过。
asked: 在 NPU 上运行过吗？ | 有没有在 NPU 上运行过？ | 能在 NPU 上运行吗？ | longcat_pd 在 NPU 上测试过吗？
asked: 在 NPU 上试过吗？
unseen: longcat_pd 在 NPU 上运行过吗？ | 有没有在 NPU 上测试过？

topic: 零专家 | 没有权重的专家
answer: 零专家没有权重，输出就是输入。
asked: 什么是零专家？ | 零专家是什么？ | 零专家做什么？ | 零专家的输出是什么？ | 介绍一下零专家。
unseen: 零专家有什么用？ | 零专家是做什么的？
"""
