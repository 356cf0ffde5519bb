"""Counts the bad rows of a file, and names the first of them."""

NAMED = 10


class BadRows:
    def __init__(self, where: str) -> None:
        """Args: where: the name of the rows in the message, such as the file's path."""
        self.where, self.count = where, 0
        self.named: list[str] = []

    def add(self, number: int, reason: str) -> None:
        self.count += 1
        if self.count <= NAMED:
            self.named.append(" ".join(f"row {number}{reason}".split()))

    def describe(self) -> str:
        """One line for one bad row, and one more for each with several; "" if there is none."""
        if self.count <= 1:
            return "".join(f"{self.where}, {named}" for named in self.named)
        end = f", of which the first {NAMED} are" if self.count > NAMED else ""
        return "\n  ".join([f"{self.where} has {self.count:,} bad rows{end}:", *self.named])
