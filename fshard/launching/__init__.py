"""A function in processes that are started for it, and a thin front of torchrun.

launch      `fs.launch(fn, processes=4)`
pool        the machinery: processes that stay, and run one function after the other
worker      one of them, from both sides
travel      how functions and results get from one to the other: by reference, or by value
shown       what processes write, shown here in whole lines
torchrun    the command line of torchrun for `fshard run`
"""
