"""Prints what tests have measured (the fixture ``figure``): ``python tests/figures.py FILE``."""

import json
import statistics
import sys
from collections import defaultdict


def main() -> None:
    """Print count, median and largest of each figure, as a table of Markdown."""
    figures = defaultdict(list)
    with open(sys.argv[1]) as file:
        for line in file:
            what, value = json.loads(line)
            figures[what].append(value)
    print("| what | times | median | largest |\n| --- | --- | --- | --- |")
    for what, values in sorted(figures.items()):
        print(f"| {what} | {len(values)} | {statistics.median(values):.4g} | {max(values):.4g} |")


if __name__ == "__main__":
    main()
