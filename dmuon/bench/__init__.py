"""The benchmark command: whole training steps of DMuon against ``fully_shard`` and AdamW.

``python -m dmuon.bench --help`` lists the options. Read ``settings``, ``contenders``, ``measure``,
``summary`` in this order; ``ranks`` starts the processes.
"""
