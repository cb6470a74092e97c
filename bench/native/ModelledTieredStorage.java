import java.io.FilterInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.server.log.remote.storage.LocalTieredStorage;
import org.apache.kafka.server.log.remote.storage.LogSegmentData;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager;

/**
 * LocalTieredStorage with the first-byte delay and the rate per request of a modelled store. LocalTieredStorage is final,
 * so this class passes every call on to one.
 *
 * <p>The file of the setting model.file has the delay in milliseconds and the bytes per second (0: unlimited), separated
 * by a space. Every fetch reads it, so a benchmark changes the model while the broker runs.
 */
public final class ModelledTieredStorage implements RemoteStorageManager {
    private final LocalTieredStorage local = new LocalTieredStorage();
    private Path modelFile;

    @Override
    public void configure(Map<String, ?> configs) {
        modelFile = Path.of((String) configs.get("model.file"));
        local.configure(configs);
    }

    @Override
    public Optional<RemoteLogSegmentMetadata.CustomMetadata> copyLogSegmentData(
            RemoteLogSegmentMetadata metadata, LogSegmentData data) throws RemoteStorageException {
        return local.copyLogSegmentData(metadata, data);
    }

    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start) throws RemoteStorageException {
        return fetched(local.fetchLogSegment(metadata, start));
    }

    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start, int end)
            throws RemoteStorageException {
        return fetched(local.fetchLogSegment(metadata, start, end));
    }

    @Override
    public InputStream fetchIndex(RemoteLogSegmentMetadata metadata, IndexType type) throws RemoteStorageException {
        return fetched(local.fetchIndex(metadata, type));
    }

    @Override
    public void deleteLogSegmentData(RemoteLogSegmentMetadata metadata) throws RemoteStorageException {
        local.deleteLogSegmentData(metadata);
    }

    @Override
    public void close() throws IOException {
        local.close();
    }

    private InputStream fetched(InputStream stream) throws RemoteStorageException {
        try {
            String[] model = Files.readString(modelFile).trim().split(" ");
            LockSupport.parkNanos((long) (Double.parseDouble(model[0]) * 1e6));
            double bytesPerSecond = Double.parseDouble(model[1]);
            return bytesPerSecond > 0 ? new PacedStream(stream, bytesPerSecond) : stream;
        } catch (IOException unreadable) {
            throw new RemoteStorageException(unreadable);
        }
    }

    /** A stream whose bytes arrive at a rate, from the moment at which it is made. */
    private static final class PacedStream extends FilterInputStream {
        private final double nanosPerByte;
        private final long began = System.nanoTime();
        private long passed;

        PacedStream(InputStream stream, double bytesPerSecond) {
            super(stream);
            nanosPerByte = 1e9 / bytesPerSecond;
        }

        @Override
        public int read() throws IOException {
            int one = super.read();
            pace(one < 0 ? 0 : 1);
            return one;
        }

        @Override
        public int read(byte[] into, int from, int count) throws IOException {
            int got = super.read(into, from, count);
            pace(Math.max(got, 0));
            return got;
        }

        private void pace(int count) {
            passed += count;
            long due = began + (long) (passed * nanosPerByte);
            for (long left; (left = due - System.nanoTime()) > 0; ) {
                LockSupport.parkNanos(left);
            }
        }
    }
}
