"""The journal: what a hub has seen, as Arrow segments that any tool can read while the hub writes them.

The core (everything but `writer`, `recorder` and `service`) needs the standard library only; what gives Arrow tables
or reads Parquet imports pyarrow when it is called. It knows no gevent and no hub: a pipeline's processes load it too.

    record      the columns and the row
    arrow       rows to bytes and back, in Arrow's own format
    segment     the files under wal/: append, index, recovery, lock
    manifest    which ranges are Parquet by now
    reader      one view over both, by sequence number
    gather      many small batches as few large ones, in LuaJIT where lupa is installed
    remote      the same view over HTTP
    commit      results back into the hub, exactly once
    retention   which files may go
"""
