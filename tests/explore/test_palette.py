"""The colours of a page's charts, as people with other cones see them: by matrices of Machado et al."""

import math
from itertools import combinations

import pytest

from fshard.explore.palette import COMPUTE, COPIES, MESSAGES, NETWORKS, PURPOSE_FILLS

TIMELINE = [*COMPUTE, *NETWORKS, MESSAGES, COPIES]
MEMORY = [*PURPOSE_FILLS.values()]
LIGHT, DARK = "#ffffff", "#161a21"
"""The panels of the page."""

# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009: severity 1.0, of linear red, green and blue.
CONES = {
    "all": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]


def lab(colour, cones):
    """Return the coordinates of a colour in CIE Lab, where a unit is about what can be told apart."""
    r, g, b = [min(1, max(0, dot(row, linear(colour)))) for row in CONES[cones]]
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    fx, fy, fz = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def dot(xs, ys):
    return sum(x * y for x, y in zip(xs, ys, strict=True))


def contrast(colour, other):
    lights = [dot((0.2126, 0.7152, 0.0722), linear(x)) + 0.05 for x in (colour, other)]
    return max(lights) / min(lights)


@pytest.mark.parametrize("cones", CONES)
@pytest.mark.parametrize("chart", [TIMELINE, MEMORY], ids=["timeline", "memory"])
def test_colours_of_a_chart_are_told_apart(chart, cones):
    distances = {pair: math.dist(*[lab(x, cones) for x in pair]) for pair in combinations(chart, 2)}
    closest = min(distances, key=distances.get)
    assert distances[closest] > 20, closest


def test_no_colour_is_in_both_charts():
    pairs = [(x, y) for x in TIMELINE for y in MEMORY]
    assert min(math.dist(lab(x, "all"), lab(y, "all")) for x, y in pairs) > 12


@pytest.mark.parametrize("colour", [*TIMELINE, *MEMORY])
def test_colours_contrast_with_light_and_dark_panels(colour):
    assert contrast(colour, LIGHT) > 1.6 and contrast(colour, DARK) > 1.6
