"""`tandem scaler`: a small controller that scales prefill and decode pods without KEDA.

law.py         how many pods each role needs: a pure function
exposition.py  one scrape of a process's /metrics
totals.py      counters of many pods over time, across restarts
readings.py    scrapes of gateways and pods -> the snapshot that the law reads
lease.py       leader election between several scalers
workloads.py   the scale subresource of Deployments and StatefulSets
controller.py  the loop
settings.py    the operator's settings
main.py        the process
"""
