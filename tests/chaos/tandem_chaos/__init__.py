"""Faults by seed against real pods, and what must hold after each (`python tests/chaos`, CONTRIBUTING.md).

command           the options, and the exit code
violations        what was found to be wrong: one sentence each

process faults    run.py: load, faults and checks in rounds
    system        gateway, pods, lookahead service and Redis under the supervisor of `tandem up`
    fork_server   starts pods by fork, in a tenth of the time
    load          the requests of a seed, their answers, the pauses in their streams
    faults        signals to processes, cuts between them
    cuts          TCP proxies that fall silent or reset
    growth        memory and descriptors of processes
    report        the table of gaps

frame faults      frames.py: waves of requests through two prefill pods and a decode pod in this process
    frame_faults  what becomes of each frame
    frame_proxy   stands between KV sender and receiver
    kv_watch      sender and receiver that note what was sent and check what is written
    frame_simulation  the same faults without sockets, threads or models

Checks of process faults: an answer equals its reference (token ids, text, log probabilities, finish
reason, the receipt's token count); no client gets an error, except that a full gateway refuses with a
retry-after; a stream leaves a decode pod that is silent for two seconds; after each round nothing is
held, every process is back, and none has grown by more than 64 MiB or 32 descriptors. A client whose
gateway is harmed resumes at another one, or begins anew if Redis lost the answer. A fault waits until
another pod of the role is healthy and the streams have moved on: two crashes without a token in between
are refused by design (docs/decisions/exact-continuation.md).

Checks of frame faults: a frame is written only into an open transfer, in its epoch, into its own block,
once; blocks that a transfer calls complete have the bytes of the prefill pod, also after a failure.

Report: the gap of a stream is its longest pause between two chunks within two seconds of a fault that
concerned it, to compare with the rows "no fault"; "KV" is the prefill and transfer time of the pod that
continued it.

Not covered: a forger who knows a transfer's id, which is the permission to write; CURVE, which the proxy
would have to end (tests/engine/test_transport_sender.py has wrong keys); the clock of Redis; certificates
under a clock that jumps (the system uses plaintext); a full push queue of the lookahead service, except
as `pause lookahead` fills it; disks that fail; two machines.
"""
