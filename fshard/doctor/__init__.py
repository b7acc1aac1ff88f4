"""`fshard doctor`: the machine, the speed of collectives, their correctness, and a verdict.

examine   one process: its machine, and the speed of collectives
check     each collective compared with its oracle
visit     the command: the results of all processes, judged and displayed
"""
