"""Launch a function or a program in new processes, and the command line in front of torchrun.

launch      `fs.launch(fn, processes=4)`
pool        the implementation: processes that persist, and run one function after another
worker      one process, from both sides
travel      pickling of functions and results: by reference, or by value
shown       displays the output of processes, line by line
meeting     the store in which processes meet, and their variables
ends        how processes ended, and whether a run that has lost some is a success
program     a program in processes that do not end with each other: `fshard run --elastic`
torchrun    the command line of `fshard run`
"""
