"""Reports of a trainer: a progress bar, metrics in a file, a trace for Perfetto.

No other package imports this one.

with fs.report.Report(fs.report.Bar(total=300), fs.report.JsonLines("run.jsonl")) as report:
    for batch in batches:
        params, state, metrics = step(params, state, batch)
        report(metrics)

Report       counts steps, adds samples a second and memory, and passes numbers to writers, on
             device 0
Writer       the protocol: write(step, values), close()
Bar          a progress bar, in a terminal, in Jupyter, and as lines in a file
JsonLines    a line of JSON per step
TensorBoard  scalars, if tensorboard is installed
Tracker      a run of Weights & Biases or of trackio, if that is installed
Profile      a Chrome trace of each device
"""

from fshard.report.bar import Bar
from fshard.report.files import JsonLines, TensorBoard, Tracker
from fshard.report.profile import Profile
from fshard.report.report import Report, Writer

__all__ = ["Bar", "JsonLines", "Profile", "Report", "TensorBoard", "Tracker", "Writer"]
