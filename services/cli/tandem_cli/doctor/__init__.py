"""`tandem doctor`: what is wrong with an installation, before it is applied and while it runs.

finding.py           what a check finds; runs a list of checks

Before, of manifests:
manifests.py         Kubernetes objects, and the workloads among them with their settings
settings_checks.py   settings that a pod refuses or ignores, and contradictions between them
network.py           the links that pods need, and what NetworkPolicies let through
network_checks.py    names, links, rights at the API server
rollout_checks.py    rollouts, drains of nodes, probes, grace periods, autoscalers
storage_checks.py    room for the model
cluster.py           what the API server says
cluster_checks.py    Secrets, StorageClasses, nodes, GPUs, DNS, kinds and images that the manifests need
before.py            all of these

After, of a running system:
system.py            gateways and pods as they describe themselves
system_checks.py     TLS, versions, clocks, revisions, objectives, room for KV
probes.py            trials: KV with a digest, certificates, rights at Redis, resumed answers
after.py             all of these

command.py           the command and its report
"""
