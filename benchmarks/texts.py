"""Texts that the copy-heavy prompts ask to repeat, edit and extract from. Written for this project."""

from __future__ import annotations

PROSE = (
    "The ferry to Holm leaves at six in the morning, before the fishmongers open, and returns at dusk. "
    "In winter the captain takes no cars, because the ramp at the old pier freezes and the tyres slide."
    " Anna Lind has sold the tickets for thirty years. She knows every passenger by name, and she keeps"
    " a tin of ginger biscuits under the counter for children who are afraid of the waves. Last spring "
    "the council wanted to replace her by a machine. Four hundred people signed a letter, and the "
    "machine now stands unplugged beside the coffee.",
    "On Tuesday the reading group will meet in the small hall, not in the library, since the library is"
    " being painted. Please bring your own cup. We begin with chapter nine, in which the clockmaker "
    "loses his licence, and we end with chapter eleven, in which he builds the tower clock by night. Mr"
    " Osei has offered to read the letter from the archive aloud. Whoever would like to propose the "
    "next book should write its title on the sheet beside the door before the break, and should have "
    "read at least half of it.",
    "The pump must be primed before it is switched on. Close the outlet valve, open the small screw on "
    "top of the housing, and pour clean water into it until no more air bubbles rise. Close the screw "
    "by hand, without a tool. Switch the pump on and open the outlet valve slowly, within about ten "
    "seconds. If the pressure stays below two bar after one minute, switch the pump off, wait until it "
    "has cooled, and start again from the beginning. Never let the pump run dry: the seal is destroyed "
    "within half a minute.",
    "My grandmother planted the walnut tree in the year that the railway came. She was nine, and the "
    "sapling was shorter than she was. When the line was closed the tree had grown taller than the "
    "signal box, and jackdaws lived in both. Nobody remembers who sold the rails. The signal box became"
    " a kitchen for bees, then a shed, then a heap of bricks, but the walnut tree still drops its fruit"
    " on the place where the trains used to stop, and every October the whole street comes with "
    "baskets.",
    "Our trial ran for twelve weeks in two warehouses. In the first warehouse the pickers kept their "
    "paper lists; in the second warehouse they wore small displays on the wrist. Errors fell from "
    "nineteen to seven in a thousand picks, and the median time for one order fell from eleven to nine "
    "minutes. Nobody was faster than before in the first two weeks, however, and three of the twenty-"
    "four pickers asked to go back to paper. We recommend the displays for the second warehouse only, "
    "and a new trial in autumn for the first.",
    "Whales that feed at the surface leave a ring of smooth water behind, which sailors call a "
    "footprint. It is made by the tail: each downward stroke pushes up a column of water, and the "
    "column spreads and flattens the ripples for several minutes. From an aircraft a line of footprints"
    " shows where a whale has gone and how fast it swam, even when the animal itself is far below. "
    "Researchers now count footprints on photographs taken by drones, because the footprints can be "
    "seen when the whales can not.",
)

CODE = (
    """def moving_average(values, window):
    if window < 1:
        raise ValueError("window must be at least 1")
    averages = []
    total = 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        if index >= window - 1:
            averages.append(total / window)
    return averages


def largest_jump(values):
    jumps = [after - before for before, after in zip(values, values[1:])]
    return max(jumps, default=0.0)
""",
    """class Inventory:
    def __init__(self):
        self.items = {}

    def add(self, name, count, price):
        if count <= 0:
            raise ValueError("count must be positive")
        old_count, _ = self.items.get(name, (0, price))
        self.items[name] = (old_count + count, price)

    def remove(self, name, count):
        old_count, price = self.items[name]
        if count > old_count:
            raise ValueError("not enough items")
        self.items[name] = (old_count - count, price)

    def total(self):
        return sum(count * price for count, price in self.items.values())
""",
    """function renderTable(rows, columns) {
  const header = columns.map((column) => `<th>${column.title}</th>`).join("");
  const body = rows
    .map((row) => {
      const cells = columns.map((column) => `<td>${row[column.key]}</td>`).join("");
      return `<tr>${cells}</tr>`;
    })
    .join("");
  return `<table><thead><tr>${header}</tr></thead><tbody>${body}</tbody></table>`;
}

function sortRows(rows, key) {
  return [...rows].sort((left, right) => (left[key] < right[key] ? -1 : 1));
}
""",
    """SELECT customers.name, customers.city, COUNT(orders.id) AS num_orders, SUM(orders.total) AS revenue
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2025-01-01'
  AND orders.created_at < '2025-07-01'
  AND orders.status = 'paid'
GROUP BY customers.name, customers.city
HAVING SUM(orders.total) > 1000
ORDER BY revenue DESC, customers.name ASC
LIMIT 50;
""",
    """import csv
from pathlib import Path


def read_people(path):
    people = []
    with Path(path).open(newline="") as file:
        for row in csv.DictReader(file):
            people.append({"name": row["name"].strip(), "age": int(row["age"])})
    return people


def oldest(people):
    return max(people, key=lambda person: person["age"])


def write_people(path, people):
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=["name", "age"])
        writer.writeheader()
        writer.writerows(people)
""",
)

RECORDS = (
    """Name: Ines Carvalho
Born: 14 March 1988
City: Porto
Job: bridge engineer
Phone: 555 0147

Name: Tomasz Wolny
Born: 2 November 1975
City: Gdansk
Job: piano tuner
Phone: 555 0162

Name: Adaeze Obi
Born: 30 July 1991
City: Enugu
Job: pharmacist
Phone: 555 0193
""",
    """Order 7731: 3 x oak shelf, 49.00 each, to Marta Eklund, Uppsala, shipped 4 May
Order 7732: 1 x desk lamp, 35.50 each, to Jon Barrett, Leeds, shipped 4 May
Order 7735: 12 x hook rail, 8.25 each, to Sofia Rossi, Bergamo, waiting for payment
Order 7736: 2 x oak shelf, 49.00 each, to Pavel Novak, Brno, shipped 6 May
Order 7740: 1 x corner table, 120.00 each, to Aiko Mori, Osaka, cancelled
""",
    """2026-02-11 08:14:02 INFO gateway started on port 8080
2026-02-11 08:14:09 INFO user 4411 logged in from 10.0.3.7
2026-02-11 08:15:31 WARNING slow query (2.4 s) on table invoices
2026-02-11 08:16:02 ERROR user 4411 payment 90313 failed: card expired
2026-02-11 08:16:40 INFO user 4411 logged out
2026-02-11 08:20:00 INFO backup finished, 1832 files
""",
    """| Station | Line | Opened | Platforms |
|---|---|---|---|
| Harbour | Blue | 1931 | 2 |
| Market Square | Blue, Red | 1934 | 4 |
| University | Red | 1958 | 2 |
| Stadium | Green | 1972 | 3 |
| Airport | Green, Blue | 1999 | 4 |
""",
)
