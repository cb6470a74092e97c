"""The remote log: from a partition's log on its leader to segments in a store, and back to record batches.

    LogSource.read -> segment builder -> COPY_SEGMENT_STARTED -> RemoteStorageManager.copy_log_segment_data
      -> read back and verified -> COPY_SEGMENT_FINISHED -> visible to every proxy -> DeleteRecords

`model` holds the values, `segment` the file formats, `storage` the stores, `metadata` the metadata topic and its local
state, `broker` the Kafka client, `log` the log on the leader, `reader` the way back, `manager` the tasks.
"""
