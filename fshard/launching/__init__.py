"""Launch a function in new processes, and the command line in front of torchrun.

launch      `fs.launch(fn, processes=4)`
pool        the implementation: processes that persist, and run one function after another
worker      one process, from both sides
travel      pickling of functions and results: by reference, or by value
shown       displays the output of processes, line by line
torchrun    the command line of torchrun for `fshard run`
"""
