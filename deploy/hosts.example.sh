# shellcheck shell=bash
# shellcheck disable=SC2034  # read by run_pd.sh
# Copy to hosts.sh (which git ignores) and edit. Each variable may be missing; run_pd.sh lays it over any cluster YAML, and
# the option of the same meaning counts more than it. Machines are reached with keys, and their host keys must be known.

iplist=(10.0.1.1 10.0.1.2 10.0.0.1 10.0.0.2)   # decode nodes, then prefill nodes, as their instances come in the YAML;
                                              # the balancer runs on the last one                            (--iplist)
ssh_port=22                                   # hosts.port                                                  (--ssh-port)
testpath=/opt/longcat                         # hosts.path: folder of each machine for code, logs, records  (--testpath)
logdir=/opt/longcat/logs                      # log_dir; without it the run folder under testpath             (--logdir)
cluster_key=/etc/longcat_pd/cluster.key       # cluster_key_file, the same file on each machine              (--cluster-key)
MODEL_PATH=/weights/LongCat-2.0-INT8          # model.path: the checkpoint, in the same place on each machine (--model-path)
