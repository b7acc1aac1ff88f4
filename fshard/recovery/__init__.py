"""Runs that continue when devices are lost: `fs.elastic`.

An elastic run is a checkpoint in the memory of its devices. In the order in which to read:

    elastic       calls the function again in each generation; `ElasticRun` is its checkpoint
    copies        versions of a tree: each device's share, and those of its neighbours
    survey        after a loss: which version has all its shares, and where they are
    source        shares in memory, read into any layout; `exchange`: bytes on request
    crew          the devices of a generation: virtual ones, or processes
    members       processes: who is left, and the world that they form; `run_folder`: their records
"""
