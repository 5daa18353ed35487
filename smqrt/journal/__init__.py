"""The journal: what a hub has seen, as Arrow segments that any tool can read while the hub writes them.

The core (everything but `durability`, `writer`, `recorder`, `service`, `listing` and `announcer`, which run in a hub)
needs the standard library only; what gives Arrow tables or reads Parquet imports pyarrow when it is called. It knows no
gevent and no hub: a pipeline's processes load it too.

    record         the columns and the row
    arrow          rows to bytes and back, in Arrow's own format
    segment        the files under wal/: append, sync, lock; `index`: which batches are where; `recovery` after a crash
    manifest       which ranges are Parquet by now; `parquet_files`, `compact`: how they become so
    reader         one view over both, by sequence number; `remote`: the same view over HTTP
    columns        recorded frames to columns, and many small batches to few large ones, with LuaJIT if it is there
    commit         results back into the hub, exactly once
    retention      which files may go
"""
