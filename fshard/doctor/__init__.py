"""`fshard doctor`: what is here, how fast processes talk, whether every collective is right, and a plain verdict.

examine   what one process finds: its machine, the speed of collectives, and each held to its oracle
visit     the command: what all processes found, judged and shown
"""
