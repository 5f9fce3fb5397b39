import re
import xml.etree.ElementTree as ET

from nestling.dash.chart import Line, Point, interval_mark, line_chart, share_bar, sparkline
from nestling.outer.stats import Estimate


def line(*pairs, label="agent", **more):
    return Line(label=label, look="a", points=[Point(x=x, mean=y) for x, y in pairs], **more)


def parse(markup):
    return ET.fromstring(str(markup).replace("&nbsp;", " "))


def test_points_stand_where_their_values_say():
    chart = parse(line_chart([line((1, 0.0), (2, 1.0), (3, 0.5))], title="t", limits=(0.0, 1.0)))
    dots = [one.attrib for one in chart.iter("circle")]
    assert [float(one["cy"].rstrip("%")) for one in dots] == [100.0, 0.0, 50.0]
    xs = [float(one["cx"].rstrip("%")) for one in dots]
    assert xs[1] == 50.0
    assert xs[0] == 100.0 - xs[2]
    path = next(one.attrib["d"] for one in chart.iter("path"))
    ys = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert ys == [1000.0, 0.0, 500.0]


def test_ticks_are_round_and_inside_whatever_the_range():
    for low, high in [(0.0, 1.0), (-3e-5, 2e-4), (5.0, 5.0), (-1234.0, 98765.0), (0.29, 0.31)]:
        chart = parse(line_chart([line((1, low), (9, high))], title="t"))
        ticks = [one for one in chart.iter("text") if one.attrib["class"] == "tick y"]
        assert 2 <= len(ticks) <= 12, (low, high)
        for one in ticks:
            assert -0.01 <= float(one.attrib["y"].rstrip("%")) <= 100.01
        whole = [one.text for one in chart.iter("text") if one.attrib["class"] == "tick x"]
        assert all(text == str(int(text)) for text in whole)


def test_one_step_and_no_step_are_charts_too():
    assert line_chart([line()], title="t") == ""
    alone = Line(label="a", look="a", points=[Point(x=1, mean=0.5, lo=0.4, hi=0.6, n=8)])
    level = line((1, 0.3), label="no-op", is_level=True)
    chart = parse(line_chart([alone, level], title="t"))
    assert len(list(chart.iter("circle"))) == 1
    assert next(one.attrib["class"] for one in chart.iter("path")) == "whisker a"


def test_every_x_reads_out_its_numbers_and_columns_tile_the_plot():
    band = Line(label="agent", look="a", points=[Point(x=1, mean=0.5, lo=0.4, hi=0.6, n=8)])
    chart = parse(line_chart([band, line((1, 0.25), (4, 0.3), label="no-op")], title="t"))
    columns = [one.find("rect").attrib for one in chart.iter("g") if one.attrib["class"] == "hit"]
    assert [one["data-say"] for one in columns] == [
        "step 1: agent 0.500 [0.400, 0.600] n=8 · no-op 0.250",
        "step 4: no-op 0.300",
    ]
    assert sum(float(one["width"].rstrip("%")) for one in columns) == 100.0


def test_text_is_escaped_everywhere():
    evil = "<b onclick=x>\"'"
    for markup in (
        line_chart([line((1, 1.0), label=evil)], title=evil, x_name=evil),
        sparkline([1.0, 2.0], evil),
    ):
        found = parse(markup)
        assert not list(found.iter("b"))
        assert evil in "".join([*found.itertext(), *(found.attrib.values())])


def test_bars_and_intervals_stay_in_their_range():
    for value in (-5.0, -0.1, 0.0, 0.4, 7.0):
        bar = parse(share_bar(value, low=-0.2, high=1.0))
        fill = [one.attrib for one in bar.iter("rect")][1]
        start, width = (float(fill[name].rstrip("%")) for name in ("x", "width"))
        assert start >= 0
        assert start + width <= 100.01
    mark = parse(interval_mark(Estimate(mean=0.1, lo=-0.1, hi=0.3, n=5), -0.5, 0.5))
    ends = [one.attrib for one in mark.iter("line") if one.attrib["class"].startswith("whisker")]
    assert (ends[0]["x1"], ends[0]["x2"]) == ("40%", "80%")
