"""`tandem doctor`: what is wrong with an installation, before it is applied and while it runs.

finding.py           what a check finds

Before, of manifests:
manifests.py         Kubernetes objects, and the workloads among them with their settings
settings_checks.py   settings that a pod refuses or ignores, and contradictions between them
lifecycle_checks.py  drains, grace periods, probes, room for the model

After, of a running system:
system.py            gateways and pods as they describe themselves
system_checks.py     TLS, versions, clocks, revisions, objectives, room for KV
probes.py            trials: KV with a digest, certificates, rights at Redis, resumed answers

examine.py           all of these
command.py           the command and its report
"""
