"""The fast lane of the inert interpreter: runs of the opcodes that almost every stream is made of.

Header pickles are a few kinds of opcodes, hundreds of thousands of times over. Calling a handler
for each of them takes three times as long as what it does. So they are carried out in one loop, as
far as all about them is ordinary. Where anything is not, the lane ends in front of that opcode, and
its handler has its turn: it makes every check, and says what is wrong. The lane refuses nothing.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from restride.storage.pickle_machine import CONTAINER_WORK

if TYPE_CHECKING:
    from restride.checkpoint.values import Value
    from restride.storage.pickle_machine import Machine

__all__ = ["run_ordinary"]

_UINT16: Final = struct.Struct("<H").unpack_from
_INT32: Final = struct.Struct("<i").unpack_from
_UINT32: Final = struct.Struct("<I").unpack_from


def run_ordinary(machine: Machine) -> None:
    """Carry out opcodes as long as they are ordinary.

    Returns:
        Nothing; the machine stands at the first opcode that was left to its handler, or at the end
        of the stream. What was done and charged is what the handlers would have done and charged.
    """
    try:
        _run(machine)
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        return  # nothing was done for the opcode at hand: its handler finds the same and refuses


def _run(machine: Machine) -> None:  # noqa: C901, PLR0912, PLR0915 - calls are what it saves
    stream, memo, marked = machine.stream, machine.memo, machine.marked
    most_marks, longest_nbytes = machine.limits.depth, machine.limits.string_nbytes
    at, stack, left = machine.at, machine.stack, machine.budget
    try:
        # The dearest opcode here makes a container, so that no sum can end inside of one.
        while left > CONTAINER_WORK:
            # By how often they come. An operand that is cut off is an error of index or struct.
            match stream[at]:
                case 0x6A:  # LONG_BINGET
                    stack.append(memo[_UINT32(stream, at + 1)[0]])
                    at += 5
                case 0x72:  # LONG_BINPUT
                    memo[_UINT32(stream, at + 1)[0]] = stack[-1]
                    at += 5
                case 0x28:  # MARK
                    if len(marked) >= most_marks:
                        break
                    marked.append(stack)
                    stack = []
                    at += 1
                case 0x4B:  # BININT1
                    stack.append(stream[at + 1])
                    at += 2
                case 0x5D:  # EMPTY_LIST
                    stack.append([])
                    left -= CONTAINER_WORK
                    at += 1
                case 0x65:  # APPENDS
                    target = marked[-1][-1]
                    if type(target) is not list:
                        break
                    target.extend(stack)
                    stack = marked.pop()
                    at += 1
                case 0x75:  # SETITEMS
                    if not _has_set_all(marked[-1][-1], stack):
                        break
                    stack = marked.pop()
                    at += 1
                case 0x7D:  # EMPTY_DICT
                    stack.append({})
                    left -= CONTAINER_WORK
                    at += 1
                case 0x61:  # APPEND
                    target = stack[-2]
                    if type(target) is not list:
                        break
                    target.append(stack.pop())
                    at += 1
                case 0x4D:  # BININT2
                    stack.append(_UINT16(stream, at + 1)[0])
                    at += 3
                case 0x68:  # BINGET
                    stack.append(memo[stream[at + 1]])
                    at += 2
                case 0x71:  # BINPUT
                    memo[stream[at + 1]] = stack[-1]
                    at += 2
                case 0x4A:  # BININT
                    stack.append(_INT32(stream, at + 1)[0])
                    at += 5
                case 0x58:  # BINUNICODE
                    start = at + 5
                    stop = start + _UINT32(stream, at + 1)[0]
                    if stop - start > longest_nbytes or stop > len(stream):
                        break
                    stack.append(str(stream[start:stop], "utf-8"))
                    at = stop
                case 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    at += 1
                case 0x86:  # TUPLE2
                    stack[-2:] = [(stack[-2], stack[-1])]
                    at += 1
                case 0x74:  # TUPLE
                    values = tuple(stack)
                    stack = marked.pop()
                    stack.append(values)
                    at += 1
                case 0x29:  # EMPTY_TUPLE
                    stack.append(())
                    at += 1
                case _:
                    break
            left -= 1
    finally:
        machine.at, machine.stack, machine.budget = at, stack, left


def _has_set_all(target: Value, values: list[Value]) -> bool:
    """Set items of a dict whose keys are text, or leave those from the first that is not one."""
    if type(target) is not dict or len(values) % 2:
        return False
    done = 0
    rest = iter(values)
    for key in rest:
        if type(key) is not str or key in target:
            del values[:done]
            return False
        target[key] = next(rest)
        done += 2
    return True
