"""Durable journal: the messages of a hub, stored as Arrow segments and Parquet files.

Any Arrow library can read the files while the hub writes them. The modules `durability`, `writer`, `recorder`,
`service` and `announcer` run in a hub. All other modules need only the standard library and don't import gevent, since
the processes of a pipeline load them too. Functions that return Arrow tables or read Parquet import pyarrow when they
are called.

    record         columns and rows
    arrow          rows to bytes and back, in Arrow's IPC format
    segment        files under wal/: append, sync, lock, index
    recovery       repair after a crash
    manifest       which ranges of rows are Parquet, and in which files
    compact        segments to Parquet files; `parquet_files` writes them
    reader         one view of both, by sequence number; `remote` has the same view over HTTP
    columns        recorded frames to columns, and small batches to large ones, with LuaJIT where it is available
    commit         results of pipelines back into the hub, exactly once
    readers        progress and backlog of the pipelines that read
    retention      which files may be removed
"""
