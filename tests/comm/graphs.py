"""Programs of gossip over a graph."""

import fshard as fs
from fshard import comm


def mixed(graph, xs, rounds, axis="node"):
    def main():
        tree = {"x": xs[fs.axis_index(axis)]}
        for turn in range(rounds):
            tree = comm.mix(tree, graph, turn, axis)
        return tree["x"]

    return fs.run(main, mesh=fs.make_mesh({"node": len(xs)}))
