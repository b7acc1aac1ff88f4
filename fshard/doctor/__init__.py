"""`fshard doctor`: the machine, the speed of collectives, their correctness, and a verdict.

examine     one process: its machine, and the speed of collectives
check       each collective compared with its oracle
left_over   files in shared memory of processes that have ended
visit       the command: the results of all processes, judged and displayed
"""
