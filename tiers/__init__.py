"""The remote log: copies a partition's log from its leader to segments in a store, and reads record batches back.

    LogSource.read -> segment builder -> COPY_SEGMENT_STARTED -> RemoteStorageManager.copy_log_segment_data
      -> read back and verified -> COPY_SEGMENT_FINISHED -> visible to every proxy -> DeleteRecords

The packages: `model` has the values, `segment` the file formats, `storage` the stores, `metadata` the metadata topic
and its local state, `broker` the Kafka client, `log` the log on the leader, `reader` the read path, and `manager` the
tasks. Internal to Tidegate.
"""
