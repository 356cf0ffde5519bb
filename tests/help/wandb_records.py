"""Reads the file that W&B writes without a network."""

import struct

from wandb.proto import wandb_internal_pb2


def wandb_records(data):
    """W&B's offline file: 7 bytes of header, then LevelDB's log in blocks of 32 KiB."""
    position, record = 7, b""
    while position + 7 <= len(data):
        left_in_block = -position % 32768
        if 0 < left_in_block < 7:
            position += left_in_block
            continue
        _crc, size, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""
