"""All processes have one decision, whichever of them fails or loses the store; the oracle is equality."""

import pytest
import torch.distributed as dist

import fshard as fs
from fshard.refit.decision import TAKE, Attempts


class StoreThatEnds:
    """A store that ends once this process has voted."""

    def __init__(self, store):
        self.store = store
        self.has_ended = False

    def add(self, key, count):
        result = self._of_living("add")(key, count)
        self.has_ended = True
        return result

    def __getattr__(self, name):
        return self._of_living(name)

    def _of_living(self, name):
        if self.has_ended:
            raise dist.DistNetworkError("the store has ended")
        return getattr(self.store, name)


def vote_and_lose_the_store(losers):
    mesh = fs.make_mesh({"device": 2})
    attempts = Attempts(f"votes without {losers}", mesh)
    decision = attempts.next()
    if dist.get_rank() in losers:
        decision._store = StoreThatEnds(decision._store)
        if hasattr(decision._record, "_store"):
            decision._record._store = decision._store
    assert decision.begin() == ""
    return decision.vote()


@pytest.mark.parametrize("losers", [(), (0,), (1,), (0, 1)])
def test_decision_is_one_for_processes_that_lose_the_store_after_their_vote(two, losers):
    assert two.run(vote_and_lose_the_store, losers) == [TAKE, TAKE]


def refuse_on_one():
    mesh = fs.make_mesh({"device": 2})
    attempts = Attempts("refused", mesh)
    results = []
    for _ in range(2):  # the second attempt has nothing of the first
        decision = attempts.next()
        if dist.get_rank() == 1:
            results.append(decision.leave("no"))
        else:
            problem = decision.begin()
            results.append(decision.leave(problem) if problem else decision.vote())
    return results


def test_decision_against_it_is_that_of_the_first_on_all(two):
    assert two.run(refuse_on_one) == [["no", "no"]] * 2
