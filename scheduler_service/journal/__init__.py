"""Journal of the scheduler: recording and replay. Format: journal.proto; reasons: ADR 5."""

from scheduler_service.journal.checkpoint import (
    CheckpointUnusable,
    class_structures,
    dump_state,
    load_state,
    scheduler_structure,
)
from scheduler_service.journal.event_codec import decode_event, encode_effect, encode_event
from scheduler_service.journal.journal import (
    JOURNAL_VERSION,
    Entries,
    FileJournal,
    Journal,
    JournalUnusable,
    NoJournal,
    Recording,
    open_journal,
    software_version,
)
from scheduler_service.journal.journal_replay import Difference, find_difference, replay
from scheduler_service.journal.request_codec import (
    decode_config,
    decode_fleet_config,
    decode_request,
    decode_sampling_params,
    decode_scheduling_params,
    encode_fields,
    encode_request,
)
from scheduler_service.journal.segment_file import (
    FRAME_BYTES,
    JournalUnreadable,
    SegmentFile,
    SegmentReader,
)

__all__ = [
    "FRAME_BYTES",
    "JOURNAL_VERSION",
    "CheckpointUnusable",
    "Difference",
    "Entries",
    "FileJournal",
    "Journal",
    "JournalUnreadable",
    "JournalUnusable",
    "NoJournal",
    "Recording",
    "SegmentFile",
    "SegmentReader",
    "class_structures",
    "decode_config",
    "decode_event",
    "decode_fleet_config",
    "decode_request",
    "decode_sampling_params",
    "decode_scheduling_params",
    "dump_state",
    "encode_effect",
    "encode_event",
    "encode_fields",
    "encode_request",
    "find_difference",
    "load_state",
    "open_journal",
    "replay",
    "scheduler_structure",
    "software_version",
]
