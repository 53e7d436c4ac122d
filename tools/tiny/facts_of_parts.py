"""What the tiny model is told about how longcat_pd and LongCat work. Data only, in the form of `facts_of_use`."""

FACTS_OF_PARTS = """
topic: the letters PD | the name PD
answer: PD stands for prefill and decode.
asked: What does PD stand for? | What does PD mean? | What is the meaning of PD? | What is PD? | Why is it called PD?
asked: What do the letters PD mean? | Explain the letters PD.
unseen: What do the letters PD stand for? | What is the meaning of the letters PD?

topic: prefill | the prefill pool
answer: Prefill computes the prompt and sends its cache to decode.
asked: What does prefill do? | What is prefill? | What is the prefill pool for? | Explain prefill.
asked: What happens in prefill?
asked: What is the job of prefill? | What does a prefill instance do? | What does the prefill worker do?
unseen: What is the task of prefill? | What does the prefill pool do?

topic: decode | the decode pool
answer: Decode receives the cache and generates the answer token by token.
asked: What does decode do? | What is decode? | What is the decode pool for? | Explain decode. | What happens in decode?
asked: What is the job of decode? | What does a decode instance do? | What does the decode worker do?
unseen: What is the task of decode? | What does the decode pool do?

topic: having two pools | separate pools
answer: With two pools, long prompts do not slow down the answers of others.
asked: Why are there two pools? | Why two pools? | Why are prefill and decode separate? | Why are the pools separate?
asked: What is the use of two pools? | Why separate prefill from decode? | What is good about two pools?
unseen: Why does it have two pools? | Why are prefill and decode apart?

topic: the cache transfer | moving the KV cache
answer: The KV cache moves layer by layer while the prompt is still being computed.
asked: How does the cache move? | How is the KV cache transferred? | When does the cache move to decode?
asked: What is the cache transfer?
asked: How does the cache get from prefill to decode? | How does the KV cache travel? | Explain the transfer of the cache.
unseen: How is the cache sent from prefill to decode? | How does the KV cache transfer work?

topic: the balancer | the load balancer
answer: The balancer sends each request to a prefill and a decode instance at once.
asked: What does the balancer do? | What is the load balancer for? | Explain the balancer. | What is the balancer?
asked: What is the job of the load balancer? | How does the balancer work? | Who sends requests to the instances?
unseen: What does the load balancer do? | What is the task of the balancer?

topic: the driver | the driver of an instance
answer: The driver speaks HTTP, queues requests and keeps the book of cache blocks.
asked: What does the driver do? | What is the driver? | What is the driver of an instance? | Explain the driver.
asked: What is the job of the driver? | Who keeps the book of cache blocks? | Who queues the requests?
unseen: What is the task of the driver? | What does the driver of an instance do?

topic: a rank | the ranks
answer: A rank is a process for one device that computes the steps.
asked: What is a rank? | What does a rank do? | Explain ranks. | What do the ranks do? | What are ranks?
asked: What is the job of a rank? | Which process computes the steps?
unseen: What is the task of a rank? | What are the ranks for?

topic: the grant | granting blocks
answer: Decode grants cache blocks for a request, and without a grant prefill does no work.
asked: What is a grant? | Who grants blocks? | What does the grant do? | What happens without a grant?
asked: Explain the grant.
asked: When does decode grant blocks? | What is the back-pressure? | Why does prefill wait for a grant?
unseen: What is the grant for? | Who gives the grant?

topic: the first token | where the first token comes from
answer: Prefill samples the first token and sends it with the commit.
asked: Who samples the first token? | Where does the first token come from? | Which pool makes the first token?
asked: How does the first token travel? | Who makes the first token? | What carries the first token?
unseen: Which pool samples the first token? | Who computes the first token?

topic: the exe modes | exe_mode
answer: The exe modes are eager, inductor, ge_graph and npugraph_ex.
asked: Which exe modes are there? | What is exe_mode? | What are the exe modes? | List the exe modes.
asked: Name the exe modes.
asked: Which values can exe_mode have? | What modes of execution are there?
unseen: What exe modes are there? | Which exe modes does it have?

topic: inductor | the mode inductor
answer: With inductor a decode step is one graph, compiled ahead of time by torch.
asked: What does inductor do? | What is inductor? | Explain the mode inductor. | How are steps compiled?
asked: What is a compiled step?
asked: How do I compile the decode step? | What is the mode inductor for? | Can decode steps be compiled?
unseen: What does the mode inductor do? | How is the decode step compiled?

topic: the drafts | multi-token prediction
answer: The draft layer proposes three tokens a step, and the model judges them in one pass.
asked: What are drafts? | What is MTP? | What is multi-token prediction? | How many drafts are there?
asked: How do drafts work?
asked: What does the draft layer do? | How many tokens does the draft layer propose? | Explain MTP. | What does MTP do?
unseen: How does MTP work? | How many drafts does a step have?

topic: the effect of drafts on the text | whether drafts change the text
answer: No, the text is the same with and without drafts.
asked: Do drafts change the text? | Do drafts change the answer? | Is the text the same with drafts?
asked: Does MTP change the text?
asked: Is the answer different with drafts? | Can drafts change what the model says? | Does MTP change the answer?
unseen: Is the text different with drafts? | Do the drafts change the answer?

topic: the n-gram embedding | n-grams | the n-grams
answer: The n-gram embedding adds vectors of the last few tokens to the vector of the word.
asked: What is the n-gram embedding? | What does the n-gram embedding do? | Explain the n-gram embedding.
asked: What are n-grams for?
asked: How does the n-gram embedding work? | Why are there n-gram tables? | What is in the n-gram tables?
unseen: What is the n-gram embedding for? | What do the n-grams do?

topic: zero experts | a zero expert
answer: A zero expert has no weights; its output is its input.
asked: What are zero experts? | What is a zero expert? | What does a zero expert do? | Explain zero experts.
asked: What is the output of a zero expert? | Why are there zero experts? | Which experts have no weights?
unseen: What do zero experts do? | Which expert has no weights?

topic: the sparse selection | what attention reads
answer: Attention reads the first tokens, the newest tokens and those that the indexer selects.
asked: Which tokens does attention read? | What does attention read? | What is sparse attention?
asked: How does sparse attention work?
asked: What is the sparse selection? | Explain sparse attention. | What are sink, window and sparse selection?
unseen: What does sparse attention read? | Which tokens are read by attention?

topic: the indexer | the lightning indexer
answer: The indexer scores earlier tokens and selects the best ones for attention.
asked: What does the indexer do? | What is the lightning indexer? | What is the indexer for? | Explain the indexer.
asked: How does the indexer work? | What is the job of the indexer? | Which part selects the tokens?
unseen: What is the task of the indexer? | What does the lightning indexer do?

topic: int8 | quantization
answer: MLPs and experts can be int8; longcat_pd.quantize makes such a checkpoint.
asked: What is int8 here? | How do I quantize a model? | Which weights are int8? | Does it support int8?
asked: What is quantized?
asked: How do I make an int8 checkpoint? | What does quantize do? | Is quantization supported?
unseen: Which weights can be int8? | How can I quantize a checkpoint?

topic: failover | a dead decode instance
answer: When a decode instance dies, another one goes on with its answers.
asked: What is failover? | What happens when a decode instance dies? | What does failover do? | Explain failover.
asked: What if an instance dies? | What happens to answers when decode dies?
asked: Who finishes the answers of a dead instance?
unseen: How does failover work? | What if a decode instance dies?

topic: communication between ranks | gloo and HCCL
answer: Ranks communicate by gloo on a CPU and by HCCL on an NPU.
asked: What is gloo for? | What is HCCL for? | How do ranks communicate? | Which collectives are used?
asked: When is gloo used?
asked: When is HCCL used? | What do gloo and HCCL do? | What is used for communication?
unseen: How do the ranks communicate? | Is gloo or HCCL used?

topic: the NPU | runs on an NPU
answer: No, nothing of this has run on an NPU yet; it is tested on CPU.
asked: Has it run on an NPU? | Has longcat_pd run on an NPU? | Does it run on an NPU? | Was it tested on an NPU?
asked: Has anybody run it on an NPU? | Is it tested on Ascend? | Did it ever run on Ascend cards?
asked: Does it work on Ascend?
unseen: Has this ever run on an NPU? | Was longcat_pd tested on Ascend?

topic: the cluster key | cluster_key_file
answer: The cluster key protects the instances; it is needed off loopback addresses.
asked: What is the cluster key? | What is cluster_key_file? | When do I need the cluster key?
asked: Why is there a cluster key?
asked: What does the cluster key protect? | What is the cluster key for? | Do I need a cluster key?
unseen: Why do I need a cluster key? | What does the cluster key do?

topic: shared prefixes | the prefix cache | sharing prefixes
answer: Prompts that begin with the same tokens share the cache of that prefix.
asked: What are shared prefixes? | What is the prefix cache? | How does the prefix cache work? | Is there prefix caching?
asked: Which prompts share the cache? | Do prompts share a prefix? | Explain the prefix cache.
unseen: What does the prefix cache do? | How are prefixes shared?

topic: structured output | JSON by a schema
answer: Answers can be bound to a JSON schema by a grammar; the library is llguidance.
asked: Does it support structured output? | What is structured output? | Can the answer be JSON? | How do I get JSON?
asked: Which library makes the grammar? | Can I give a JSON schema? | Is response_format supported?
asked: What is llguidance for?
unseen: How does structured output work? | Can answers follow a JSON schema?

topic: the API | the kind of API
answer: The API is compatible with OpenAI: chat completions, completions and models.
asked: Which API does it have? | Is the API compatible with OpenAI? | Does it work with the OpenAI client?
asked: What is the API?
asked: Which API does it offer? | Can I use the OpenAI client? | What kind of API is it? | Describe the API.
unseen: What API does it have? | Is it compatible with the OpenAI client?

topic: the 192 cards | the layout of the large cluster
answer: Of the 192 cards, 64 are for prefill and 128 for decode.
asked: How are the 192 cards used? | What is the layout of the 192 cards? | How many cards are for prefill?
asked: How many cards are for decode? | How large is the large cluster? | How many cards has the large cluster?
unseen: How are the 192 cards laid out? | How many of the cards are for prefill?

topic: a wrong configuration | errors of the configuration
answer: A wrong configuration is refused before loading, with all findings at once.
asked: What happens with a wrong configuration? | What if the configuration is wrong? | How are wrong settings found?
asked: What happens when a key is wrong? | Is the configuration checked? | What if my YAML is wrong?
unseen: What if a setting is wrong? | What happens if the configuration is wrong?

topic: YaRN | the long context
answer: YaRN stretches the rotary positions so that the model can read long contexts.
asked: What is YaRN? | What does YaRN do? | Explain YaRN. | How are long contexts possible? | Why is YaRN used?
asked: How does YaRN work? | What makes the long context possible?
unseen: What is YaRN for? | What is YaRN good for?

topic: a device or process that is lost | instances that end
answer: Nothing is started again by itself; use run_pd.sh stop and start.
asked: Is anything started again by itself? | Does it start again by itself? | Who starts a lost process again?
asked: Does a lost process come back by itself? | Is an ended instance started again? | Will it come back by itself?
unseen: Is a lost process started again by itself? | Does an instance come back by itself?
"""
