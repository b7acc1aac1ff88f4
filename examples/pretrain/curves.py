"""Draw the curves of some runs: python examples/pretrain/curves.py OUT.svg NAME=FOLDER ...

Prints how the runs differ. Of a step that a resumed run has repeated, both lines must be equal.
"""

import json
import sys
from pathlib import Path

NUMBERS = ("loss", "grad_norm", "held_out_loss")
LEFT, TOP, WIDTH, HEIGHT = 46, 34, 620, 250
DASH = 16
"""Length of a dash. Each run has a turn of its own: equal curves are one line of all colours."""

# Colours that differ in lightness, readable on white and on black: the picture has no background.
COLOURS = ("#9a6f00", "#2f7ed8", "#c2417c", "#2a9d63")


def read(folder):
    """Return the numbers of each step of a run."""
    rows = {}
    for line in (Path(folder) / "report.jsonl").read_text().splitlines():
        row = json.loads(line)
        numbers = {name: row[name] for name in NUMBERS if name in row}
        if rows.setdefault(row["step"], numbers) != numbers:
            raise SystemExit(f"{folder}: step {row['step']} was repeated with other numbers.")
    return rows


def points(rows, name, highest):
    """Return the points of a polyline."""
    last = max(rows)
    result = []
    for step, numbers in sorted(rows.items()):
        if name in numbers:
            x = LEFT + WIDTH * step / last
            y = TOP + HEIGHT * (1 - numbers[name] / highest)
            result.append(f"{x:.1f},{y:.1f}")
    return " ".join(result)


def picture(runs):
    """Return the losses of the runs as an SVG."""
    highest = 8
    last = max(max(rows) for rows in runs.values())
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 24} {TOP + HEIGHT + 46}"'
        ' font-family="sans-serif" font-size="12" fill="none">',
        "<title>Loss of pretraining by step</title>",
    ]
    grey = 'stroke="#808080" stroke-opacity="0.4"'
    for loss in range(0, highest + 1, 2):
        y = TOP + HEIGHT * (1 - loss / highest)
        lines.append(f'<path d="M{LEFT} {y} h{WIDTH}" {grey}/>')
        lines.append(
            f'<text x="{LEFT - 8}" y="{y + 4}" fill="#808080" text-anchor="end">{loss}</text>'
        )
    for part in range(5):
        x = LEFT + WIDTH * part / 4
        y = TOP + HEIGHT + 18
        lines.append(
            f'<text x="{x}" y="{y}" fill="#808080" text-anchor="middle">{last * part // 4}</text>'
        )

    note = "steps; thick: held-out documents"
    lines.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 36}" fill="#808080">{note}</text>')
    count = len(runs)
    for number, (name, rows) in enumerate(runs.items()):
        colour = f'stroke="{COLOURS[number]}"'
        gap = DASH * (count - 1)
        dash = f'stroke-dasharray="{DASH} {gap}" stroke-dashoffset="{-DASH * number}"'
        x = LEFT + number * WIDTH // count
        lines += [
            f'<polyline points="{points(rows, "loss", highest)}" {colour} {dash}/>',
            f'<polyline points="{points(rows, "held_out_loss", highest)}" {colour} {dash}'
            ' stroke-width="4"/>',
            f'<path d="M{x} 14 h20" {colour} stroke-width="4"/>',
            f'<text x="{x + 26}" y="18" fill="{COLOURS[number]}">{name}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def main(out, *names_and_folders):
    runs = {}
    for argument in names_and_folders:
        name, _, folder = argument.partition("=")
        runs[name] = read(folder)

    first_name, *others = runs
    for name in others:
        steps = runs[name].keys() & runs[first_name].keys()
        unlike = [step for step in steps if runs[name][step] != runs[first_name][step]]
        print(
            f"{name} and {first_name}: {len(steps) - len(unlike)} of {len(steps)} steps are equal"
        )
    Path(out).write_text(picture(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
