import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Repartitioned;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlyKeyValueStore;
import org.apache.kafka.streams.state.Stores;

/**
 * A Kafka Streams application. A command is a line of words on standard input. The answer is any number of lines and a
 * last one: OK or ERROR. The stores are in memory, so every start restores them.
 *
 * <p>The store "table" has the topic given as its source, which is also its changelog. "everywhere" is a GlobalKTable.
 * "counts" counts the values of the input behind a repartition topic, and has its own changelog.
 */
public final class StreamsApp {
    private static final Duration TIMEOUT = Duration.ofSeconds(240);
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static final Map<String, KafkaStreams> RUNNING = new HashMap<>();

    public static void main(String[] args) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            try {
                run(line.split(" "));
                OUT.println("OK");
            } catch (Exception error) {
                OUT.println("ERROR " + error);
            }
            OUT.flush();
        }
    }

    private static void run(String[] args) throws Exception {
        String application = args[1];
        switch (args[0]) {
            case "start" -> start(application, args[2], args[3], args[4], args[5], args[6], args[7]);
            case "stop" -> stop(RUNNING.remove(application));
            case "all" -> all(RUNNING.get(application), args[2]);
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    /** Starts the application. Returns when it runs and all its stores are restored. */
    private static void start(
            String application, String bootstrap, String folder, String protocol, String source, String global,
            String input) throws InterruptedException {
        var properties = new Properties();
        properties.put(StreamsConfig.APPLICATION_ID_CONFIG, application);
        properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, bootstrap);
        properties.put(StreamsConfig.STATE_DIR_CONFIG, folder);
        properties.put(StreamsConfig.GROUP_PROTOCOL_CONFIG, protocol);
        properties.put(StreamsConfig.TOPOLOGY_OPTIMIZATION_CONFIG, StreamsConfig.OPTIMIZE);
        properties.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        properties.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        properties.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
        properties.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        properties.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 100);
        properties.put(StreamsConfig.REPARTITION_PURGE_INTERVAL_MS_CONFIG, 200);
        properties.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");

        var builder = new StreamsBuilder();
        builder.table(source, Materialized.<String, String>as(Stores.inMemoryKeyValueStore("table")));
        builder.globalTable(global, Materialized.<String, String>as(Stores.inMemoryKeyValueStore("everywhere")));
        builder.<String, String>stream(input)
                .selectKey((key, value) -> value.substring(0, 1))
                .repartition(Repartitioned.<String, String>as("by-letter").withNumberOfPartitions(1))
                .groupByKey()
                .count(Materialized.<String, Long>as(Stores.inMemoryKeyValueStore("counts"))
                        .withKeySerde(Serdes.String())
                        .withValueSerde(Serdes.Long()));

        var streams = new KafkaStreams(builder.build(properties), properties);
        var running = new CountDownLatch(1);
        var failures = new StringBuffer();
        streams.setUncaughtExceptionHandler(error -> {
            failures.append(error);
            running.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        streams.setStateListener((now, before) -> {
            if (now == KafkaStreams.State.RUNNING) {
                running.countDown();
            }
        });
        RUNNING.put(application, streams);
        streams.start();
        if (!running.await(TIMEOUT.toSeconds(), TimeUnit.SECONDS) || !failures.isEmpty()) {
            throw new IllegalStateException("not running but " + streams.state() + ": " + failures);
        }
    }

    /** Leaves the group at once, and deletes the state on disk. */
    private static void stop(KafkaStreams streams) {
        var leave = CloseOptions.groupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP);
        if (!streams.close(leave.withTimeout(TIMEOUT))) {
            throw new IllegalStateException("not stopped but " + streams.state());
        }
        streams.cleanUp();
    }

    private static void all(KafkaStreams streams, String store) {
        ReadOnlyKeyValueStore<String, Object> found =
                streams.store(StoreQueryParameters.fromNameAndType(store, QueryableStoreTypes.keyValueStore()));
        try (var entries = found.all()) {
            entries.forEachRemaining(entry -> OUT.println(entry.key + " " + entry.value));
        }
    }
}
