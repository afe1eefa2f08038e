"""`tandem chaos`: faults by seed against real pods, and what must hold after each (docs/chaos.md).

command           the options, and the exit code
violations        what was found to be wrong: one sentence each

process faults    run.py: load, faults and checks in rounds
    fleet         gateway, pods, lookahead service and Redis under the supervisor of `tandem up`
    fork_server   starts pods by fork, in a tenth of the time
    load          the requests of a seed, their answers, the pauses in their streams
    faults        signals to processes, cuts between them
    cuts          TCP proxies that fall silent or reset
    checks        what an idle fleet may hold; memory and descriptors
    report        the table of gaps

frame faults      frames.py: waves of requests through two prefill pods and a decode pod in this process
    frame_faults  what becomes of each frame
    frame_proxy   stands between KV sender and receiver
    kv_watch      sender and receiver that note what was sent and check what is written
    frame_simulation  the same faults without sockets, threads or models
"""
