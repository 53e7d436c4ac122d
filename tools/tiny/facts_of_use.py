"""What the tiny model is told about using longcat_pd: commands, ports, files and routes. Data only.

A block is one fact: `topic` names it as a noun in two or three ways, `answer` is the only answer, `asked` are the
questions of the training, `unseen` are questions that are kept for the test.
"""

FACTS_OF_USE = """
topic: longcat_pd | the project longcat_pd
answer: longcat_pd serves LongCat models with prefill and decode on separate instances.
asked: What is longcat_pd? | What is longcat_pd for? | What does longcat_pd do? | Describe longcat_pd.
asked: Explain longcat_pd.
asked: What is this project? | What is this project about? | What does this software do? | Describe this project.
unseen: What kind of software is longcat_pd? | What does this project do?

topic: the models that longcat_pd serves | the supported models
answer: It serves LongCat-2.0, Flash-Lite, Flash-Lite-Sparse and Flash-Chat.
asked: Which models does it serve? | Which models are supported? | What models can I serve? | List the models.
asked: Which LongCat models does longcat_pd serve? | Which models can longcat_pd run? | Name the supported models.
unseen: Which models does longcat_pd support? | What models can it run?

topic: the port of the balancer | the balancer's port number
answer: The load balancer listens on port 8081.
asked: Which port does the balancer use? | On which port does the load balancer listen?
asked: What is the port of the balancer?
asked: What port is the load balancer on? | Balancer port? | Which port do clients connect to?
asked: Where do clients send requests?
unseen: What is the port number of the load balancer? | On what port does the balancer listen?

topic: the port of the prefill instance | the prefill port number
answer: The first prefill instance listens on port 30000.
asked: Which port does prefill use? | On which port does the prefill instance listen? | What is the port of prefill?
asked: What port is the prefill instance on? | Prefill port? | Which port does the prefill worker have?
unseen: What is the port number of the prefill instance? | On what port does prefill listen?

topic: the port of the decode instance | the decode port number
answer: The first decode instance listens on port 31000.
asked: Which port does decode use? | On which port does the decode instance listen? | What is the port of decode?
asked: What port is the decode instance on? | Decode port? | Which port does the decode worker have?
unseen: What is the port number of the decode instance? | On what port does decode listen?

topic: starting the cluster | the start command
answer: Run bash deploy/run_pd.sh start.
asked: How do I start the cluster? | How do I start longcat_pd? | Which command starts the cluster? | How do I launch it?
asked: How can I start the servers? | How to start it? | How do I bring the cluster up? | What starts the cluster?
unseen: Which command starts longcat_pd? | How can I start the cluster?

topic: stopping the cluster | the stop command
answer: Run bash deploy/run_pd.sh stop; running requests finish first.
asked: How do I stop the cluster? | How do I stop longcat_pd? | Which command stops the cluster? | How do I shut it down?
asked: How can I stop the servers? | How to stop it? | How do I end the cluster? | What stops the cluster?
unseen: Which command stops longcat_pd? | How can I stop the cluster?

topic: the state of the cluster | the status command
answer: Run bash deploy/run_pd.sh status to see every service.
asked: How do I see the status of the cluster? | How do I check the status? | Which command shows the status?
asked: How do I see whether it is running? | How can I check whether the cluster is running? | What shows the status?
unseen: Which command shows the status of the cluster? | How can I see the status?

topic: the logs | the logs command | the log files
answer: Run bash deploy/run_pd.sh logs; the files are in .run/local-cpu/.
asked: How do I see the logs? | Where are the logs? | Which command shows the logs? | Where are the log files?
asked: How can I read the logs? | In which folder are the logs? | How do I follow the logs?
unseen: Where do I find the logs? | Which folder has the log files?

topic: restarting the cluster | the restart command
answer: Run bash deploy/run_pd.sh restart; it stops and starts again.
asked: How do I restart the cluster? | Which command restarts the cluster? | How to restart it?
asked: How can I restart longcat_pd?
asked: What does restart do? | How do I restart the servers? | What restarts the cluster?
unseen: How can I restart the cluster? | Which command restarts longcat_pd?

topic: run_pd.sh code | the verb code
answer: The verb code copies the code to all machines and verifies it.
asked: What does run_pd.sh code do? | What is the verb code for? | How do I copy the code to all machines?
asked: Which verb copies the code? | How does the code get to the machines? | What does the code verb do?
unseen: How do I bring the code to the machines? | What does the verb code do?

topic: run_pd.sh doctor | the verb doctor
answer: The verb doctor looks at cards, network, ports, disk and weights and changes nothing.
asked: What does run_pd.sh doctor do? | What is the doctor for? | What does the doctor check? | What is the verb doctor?
asked: How do I check all machines? | Which verb checks the machines? | What does the doctor look at?
unseen: What does the verb doctor do? | Which verb looks at all machines?

topic: infer.sh | the offline script | the script infer.sh
answer: deploy/infer.sh runs the prompts of a YAML file offline, without a server.
asked: What does infer.sh do? | What is infer.sh for? | How do I run prompts offline? | How do I infer without a server?
asked: Which script runs offline? | Explain infer.sh. | How can I run it offline? | What is offline inference here?
unseen: Which script runs prompts offline? | What is deploy/infer.sh?

topic: the line that says that it is up | the ready line
answer: The line is: The server is fired up and ready to roll!
asked: Which line says that it is up? | What does the log say when the server is ready?
asked: Which line says that the server is ready?
asked: How do I know that the server is up? | What is the ready line? | What is printed when the server is ready?
unseen: What does the server print when it is ready? | Which log line says that the server is up?

topic: the configuration file | the default YAML file
answer: Everything is in one YAML; the default is deploy/config/cluster/local-cpu.yaml.
asked: Where is the configuration? | Which file configures the cluster? | Where is the config file?
asked: What is the default YAML?
asked: Which config file is used? | Which YAML is the default? | Where do I configure the cluster?
unseen: Where is the configuration file? | Which YAML configures the cluster?

topic: overriding a key | the option --set
answer: Use --set key=value; it is checked like the file.
asked: How do I override a key? | What does --set do? | How do I change a setting? | How do I set another value?
asked: How can I override a key of the YAML? | How do I change a key? | What is the option --set for?
unseen: How can I change a setting? | How do I override a setting?

topic: the metrics | the metrics route
answer: GET /metrics gives the figures as Prometheus text.
asked: Where are the metrics? | How do I get the metrics? | Is there a metrics route? | Does it support Prometheus?
asked: Which route shows the metrics? | How can Prometheus read it? | In what format are the metrics?
unseen: Which route has the metrics? | Are there metrics for Prometheus?

topic: /ready | the readiness route
answer: GET /ready says whether it can serve, and if not, why.
asked: What does /ready say? | What is /ready for? | Which route says that it is able to serve?
asked: What does the route /ready do?
asked: How do I test readiness? | Which route shows readiness? | How do I ask whether it can serve?
unseen: What does /ready tell? | What is the route /ready?

topic: the request id | the header X-Request-Id
answer: Every answer carries X-Request-Id, which stands on every log line about the request.
asked: What is X-Request-Id? | How do I find a request in the logs? | What is the request id? | Where is the request id?
asked: Which header has the request id? | How can I trace a request? | What is the header X-Request-Id for?
unseen: Which header names the request? | How do I trace one request?

topic: flushing the cache | the route /flush_cache
answer: POST /flush_cache forgets all shared prefixes.
asked: How do I flush the cache? | What does /flush_cache do? | Which route flushes the cache? | How do I clear the cache?
asked: How can I empty the cache? | How do I forget the prefixes? | What is the route /flush_cache for?
unseen: Which route clears the cache? | How can I flush the cache?

topic: counting tokens | the route /tokenize
answer: POST /tokenize gives the token ids that generation would use.
asked: What does /tokenize do? | How do I count tokens? | Which route gives token ids? | How do I tokenize a text?
asked: How can I get the token ids? | How many tokens has my text? | What is the route /tokenize for?
unseen: Which route counts tokens? | How can I tokenize a prompt?

topic: draining a server | the route /admin/drain
answer: POST /admin/drain lets running requests finish and takes no new ones.
asked: What does drain do? | How do I drain an instance? | What is draining? | Which route drains a server?
asked: How do I stop taking new requests? | What does /admin/drain do? | How can I drain a server?
unseen: How can I drain an instance? | What is /admin/drain for?

topic: the command plan | longcat-pd plan
answer: longcat-pd plan shows memory, ports and links of a cluster without starting it.
asked: What does longcat-pd plan do? | What is the plan? | How do I plan a cluster? | How much memory will a card need?
asked: Which command shows the memory of every card? | What does plan show? | How can I plan the memory?
unseen: Which command plans a cluster? | What does the command plan show?

topic: the command render | longcat-pd render
answer: longcat-pd render writes manifests for Kubernetes or units for systemd.
asked: What does longcat-pd render do? | How do I run it on Kubernetes? | Does it run on Kubernetes?
asked: What does render write?
asked: How do I get systemd units? | Which command writes Kubernetes manifests? | Is there support for systemd?
unseen: How do I get Kubernetes manifests? | What does the command render do?

topic: serving without a cluster | longcat-pd serve | the command serve
answer: longcat-pd serve gives the same API from one engine, without a cluster.
asked: How do I serve without a cluster? | What does longcat-pd serve do? | Can I run it without a cluster?
asked: How do I run one engine? | Is there a standalone server? | How do I serve from one engine?
asked: What is standalone mode?
unseen: How can I run one engine without a cluster? | What does the command serve do?

topic: the licence | the license of longcat_pd
answer: The licence is Apache-2.0.
asked: What is the licence? | What is the license? | Which license does it have? | Under which licence is longcat_pd?
asked: How is it licensed? | Which licence does this project use? | What license does longcat_pd have?
unseen: Which licence does longcat_pd have? | What is the license of this project?

topic: the Python version | the version of Python
answer: It needs Linux with Python 3.10 or newer.
asked: Which Python version do I need? | What Python is needed? | Which version of Python does it need?
asked: Does it run with Python 3.10? | What Python version is required? | Which Python does it require?
unseen: What version of Python do I need? | Which Python is needed?

topic: the tests | running the tests
answer: Run make check and make test.
asked: How do I run the tests? | Which command runs the tests? | How is it tested? | How can I test it?
asked: How do I test the code?
asked: What runs the tests? | How do I run the unit tests? | Is there a test suite?
unseen: How can I run the tests? | Which command tests the code?

topic: the documentation | the docs
answer: The documentation is in README.md and in the folder docs.
asked: Where is the documentation? | Where are the docs? | Is there documentation? | What should I read first?
asked: Which folder has the docs? | Where can I read more? | Where is the manual?
unseen: Where do I find the documentation? | Which folder has the documentation?
"""
