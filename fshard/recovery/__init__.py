"""Runs that go on when devices are lost: `fs.elastic`."""
