"""The benchmark command: whole training steps of DMuon against AdamW and other Muons.

``python -m dmuon.bench --help`` lists the options. Read ``settings``, ``contenders``, ``track``,
``measure``, ``summary`` in this order; ``ranks`` starts the processes.
"""
