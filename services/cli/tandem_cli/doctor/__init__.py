"""`tandem doctor` finds faults of an installation, before it is applied and while it runs.

finding.py           the result of a check

Manifests, before they are applied:
manifests.py         Kubernetes objects, and the workloads among them with their settings
settings_checks.py   settings that a pod refuses or ignores, and contradictions between them
lifecycle_checks.py  drains, grace periods, probes, room for the model

A running system:
system.py            status that gateways and pods report
system_checks.py     TLS, versions, clocks, revisions, objectives, room for KV
probes.py            trials: KV with a digest, certificates, Redis permissions, resumed answers

examine.py           runs all checks
command.py           the command and its report
"""
