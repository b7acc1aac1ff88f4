"""`fshard doctor`: what is here, how fast processes talk, whether every collective is right, and a plain verdict.

machine   what this process runs on, and how it was started
speeds    how long collectives take between the processes
trials    every collective, held to its oracle
examine   all of that, in one process
verdict   what all processes found, in one sentence, and what to do
page      the same for a person to read
visit     the command
"""
