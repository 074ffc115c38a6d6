"""Read what the compiler made: machine code of NVIDIA GPUs, as nvdisasm prints it."""

import re
from collections import Counter, deque
from dataclasses import dataclass

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_WIDTH = re.compile(r"\.(U8|S8|U16|S16|64|128|256)(?=\.|$)")
_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        predicated: whether it is done under a condition.
        opcode: with its modifiers.
        arguments: as printed.
    """

    predicated: bool
    opcode: str
    arguments: str

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def bits(self) -> int:
        """Width of an access to memory."""
        found = _WIDTH.findall(self.opcode)
        return _BITS[found[-1]] if found else 32

    @property
    def is_data(self) -> bool:
        """Whether it reads or writes data: those have a cache hint, tables and flags have none."""
        return self.base in ("LDG", "STG") and ".EF" in self.opcode


@dataclass(frozen=True, slots=True)
class Listing:
    """A kernel's instructions, and where each may continue."""

    instructions: list[Instruction]
    successors: list[list[int]]

    @classmethod
    def parse(cls, text: str) -> "Listing":
        """Read the output of ``nvdisasm -c``."""
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label.group(1)] = len(instructions)
            elif found := _LINE.match(line):
                instructions.append(
                    Instruction(bool(found.group(1)), found.group(2), found.group(3))
                )
        successors: list[list[int]] = []
        for index, each in enumerate(instructions):
            following = [index + 1] if index + 1 < len(instructions) else []
            target = re.search(r"`\((\.L_\w+)\)", each.arguments)
            if each.base == "BRA" and target:
                conditional = each.predicated or "P" in each.arguments.split("`")[0]
                following = [labels[target.group(1)], *(following if conditional else [])]
            elif each.base in ("EXIT", "RET") and not each.predicated:
                following = []
            successors.append(following)
        return cls(instructions, successors)

    def widths(self, base: str) -> dict[int, int]:
        """Return how many accesses to data there are of each width: LDG or STG."""
        return dict(
            Counter(each.bits for each in self.instructions if each.base == base and each.is_data)
        )

    def count(self, *bases: str) -> int:
        """Return how many instructions have one of these opcodes."""
        return sum(each.base in bases for each in self.instructions)

    def data_loop(self) -> tuple[int, int]:
        """Return the instructions of one turn of the loop that stores data, and the bytes a thread stores in it.

        Of several such loops, that with the fewest instructions for its bytes; (0, 0) if there is none.
        """
        loops = []
        for start, each in enumerate(self.instructions):
            if each.base == "STG" and each.is_data and (path := self._shortest_cycle(start)):
                stored = sum(
                    self.instructions[i].bits // 8
                    for i in path
                    if self.instructions[i].base == "STG" and self.instructions[i].is_data
                )
                loops.append((len(path), stored))
        return min(loops, key=lambda loop: loop[0] / loop[1], default=(0, 0))

    def _shortest_cycle(self, start: int) -> list[int]:
        before = {start: -1}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            for following in self.successors[here]:
                if following == start:
                    path = [here]
                    while before[path[-1]] >= 0:
                        path.append(before[path[-1]])
                    return path
                if following not in before:
                    before[following] = here
                    queue.append(following)
        return []

    def bytes_in_flight(self) -> int:
        """Return the most bytes of data that a thread has asked for before it needs the first of them."""
        waiting: set[int] = set()
        size = most = 0
        leaders = {target for each in self.successors if len(each) > 1 for target in each}
        for index, each in enumerate(self.instructions):
            if index in leaders or _registers(each) & waiting:
                waiting, size = set(), 0
            if each.base == "LDG" and each.is_data:
                first = re.search(r"\bR(\d+)", each.arguments)
                if first:
                    waiting |= {int(first.group(1)) + i for i in range(max(1, each.bits // 32))}
                    size += each.bits // 8
                    most = max(most, size)
        return most


def _registers(instruction: Instruction) -> set[int]:
    """Return the registers that an instruction reads or, if it is no load, touches."""
    arguments = instruction.arguments
    if instruction.base == "LDG":
        # what a load writes does not wait for anything
        arguments = arguments.partition(",")[2]
    found: set[int] = set()
    for number, wide in re.findall(r"\bR(\d+)(\.64)?", arguments):
        found |= {int(number)} | ({int(number) + 1} if wide else set())
    return found
