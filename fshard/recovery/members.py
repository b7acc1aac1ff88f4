"""Placeholder until the branch of processes is merged."""


class Members: ...
