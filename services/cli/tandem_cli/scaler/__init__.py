"""`tandem scaler`: a small controller that scales prefill and decode pods without KEDA.

law.py         what each role needs: a pure function
exposition.py  one scrape of a process's /metrics
totals.py      counters of many pods over time, though pods come and go
readings.py    scrapes of gateways and pods -> the snapshot that the law reads
lease.py       who of several scalers decides
workloads.py   the scale subresource of Deployments and StatefulSets
controller.py  the loop
settings.py    what an operator chooses
main.py        the process
"""
