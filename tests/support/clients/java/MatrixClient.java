import java.io.BufferedReader;
import java.io.FileReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.Future;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * The Java client, on partition 0. A command is a line of words on standard input. The answer is a line per record
 * (offset, timestamp, key, value, headers) and a last line: OK, OFFSET_OUT_OF_RANGE or ERROR. Bytes are in hex.
 */
public final class MatrixClient {
    private static final Duration TIMEOUT = Duration.ofSeconds(240);
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);

    public static void main(String[] args) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line; (line = lines.readLine()) != null; ) {
            try {
                run(line.split(" "));
                OUT.println("OK");
            } catch (OffsetOutOfRangeException error) {
                OUT.println("OFFSET_OUT_OF_RANGE");
            } catch (Exception error) {
                OUT.println("ERROR " + error);
            }
            OUT.flush();
        }
    }

    private static void run(String[] args) throws Exception {
        String bootstrap = args[1];
        String topic = args[2];
        switch (args[0]) {
            case "produce" -> produce(bootstrap, topic, null, true, List.of(args).subList(3, args.length));
            case "transact" -> produce(
                    bootstrap, topic, args[3], Boolean.parseBoolean(args[4]), List.of(args).subList(5, args.length));
            case "consume" -> consume(bootstrap, topic, args[3], Integer.parseInt(args[4]), args[5], args[6]);
            case "read" -> read(
                    bootstrap, topic, Long.parseLong(args[3]), Integer.parseInt(args[4]), args[5], args[6]);
            case "read-to" -> readTo(bootstrap, topic, Long.parseLong(args[3]), Long.parseLong(args[4]), args[5]);
            case "offsets" -> offsets(bootstrap, topic, Long.parseLong(args[3]));
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    private static void produce(String bootstrap, String topic, String transactionalId, boolean commit, List<String> values)
            throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("acks", "all");
        settings.put("enable.idempotence", "true");
        settings.put("batch.size", "4096");
        settings.put("linger.ms", "5");
        settings.put("max.block.ms", String.valueOf(TIMEOUT.toMillis()));
        settings.put("delivery.timeout.ms", String.valueOf(TIMEOUT.toMillis()));
        settings.put("transaction.timeout.ms", String.valueOf(TIMEOUT.toMillis()));
        if (transactionalId != null) settings.put("transactional.id", transactionalId);
        try (var producer = new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            if (transactionalId != null) {
                producer.initTransactions();
                producer.beginTransaction();
            }
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            for (String value : values) {
                sent.add(producer.send(new ProducerRecord<>(topic, 0, null, HexFormat.of().parseHex(value))));
            }
            producer.flush();
            for (var one : sent) one.get();
            if (transactionalId != null && commit) producer.commitTransaction();
            if (transactionalId != null && !commit) producer.abortTransaction();
        }
    }

    private static KafkaConsumer<byte[], byte[]> consumer(String bootstrap, String isolation, Map<String, String> more) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("enable.auto.commit", "false");
        settings.put("default.api.timeout.ms", String.valueOf(TIMEOUT.toMillis()));
        settings.put("isolation.level", isolation);
        settings.putAll(more);
        // The user and the security settings. A test may change the file before each call.
        String file = System.getProperty("client.settings");
        if (file != null) {
            try (var reader = new FileReader(file, StandardCharsets.UTF_8)) {
                settings.load(reader);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
        return new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private static void consume(
            String bootstrap, String topic, String group, int count, String isolation, String protocol) {
        var more = Map.of("group.id", group, "auto.offset.reset", "earliest", "group.protocol", protocol);
        try (var consumer = consumer(bootstrap, isolation, more)) {
            consumer.subscribe(List.of(topic));
            long next = take(consumer, count);
            consumer.commitSync(Map.of(new TopicPartition(topic, 0), new OffsetAndMetadata(next)));
        }
    }

    private static void read(
            String bootstrap, String topic, long offset, int count, String isolation, String maxBytes) {
        var partition = new TopicPartition(topic, 0);
        var more = Map.of("auto.offset.reset", "none", "max.partition.fetch.bytes", maxBytes);
        try (var consumer = consumer(bootstrap, isolation, more)) {
            consumer.assign(List.of(partition));
            consumer.seek(partition, offset);
            take(consumer, count);
        }
    }

    private static void readTo(String bootstrap, String topic, long offset, long end, String isolation) {
        var partition = new TopicPartition(topic, 0);
        long deadline = System.nanoTime() + TIMEOUT.toNanos();
        try (var consumer = consumer(bootstrap, isolation, Map.of("auto.offset.reset", "none"))) {
            consumer.assign(List.of(partition));
            consumer.seek(partition, offset);
            while (consumer.position(partition) < end) {
                if (System.nanoTime() > deadline) throw new IllegalStateException("at " + consumer.position(partition));
                for (var record : consumer.poll(Duration.ofMillis(100))) print(record);
            }
        }
    }

    private static void offsets(String bootstrap, String topic, long timestamp) {
        var partition = new TopicPartition(topic, 0);
        try (var consumer = consumer(bootstrap, "read_uncommitted", Map.of())) {
            long earliest = consumer.beginningOffsets(List.of(partition)).get(partition);
            long latest = consumer.endOffsets(List.of(partition)).get(partition);
            var found = consumer.offsetsForTimes(Map.of(partition, timestamp)).get(partition);
            OUT.println(earliest + " " + latest + " " + (found == null ? -1 : found.offset()));
        }
    }

    /** Prints `count` records. Returns the offset behind the last one. */
    private static long take(KafkaConsumer<byte[], byte[]> consumer, int count) {
        long deadline = System.nanoTime() + TIMEOUT.toNanos();
        long next = -1;
        for (int taken = 0; taken < count; ) {
            if (System.nanoTime() > deadline) throw new IllegalStateException(taken + " of " + count + " records came");
            for (var record : consumer.poll(Duration.ofMillis(500))) {
                if (taken == count) break;
                print(record);
                next = record.offset() + 1;
                taken++;
            }
        }
        return next;
    }

    private static void print(ConsumerRecord<byte[], byte[]> record) {
        var line = new StringBuilder();
        line.append(record.offset()).append(' ').append(record.timestamp());
        line.append(' ').append(hex(record.key())).append(' ').append(hex(record.value()));
        for (var header : record.headers()) line.append(' ').append(header.key()).append('=').append(hex(header.value()));
        OUT.println(line);
    }

    private static String hex(byte[] bytes) {
        return bytes == null ? "null" : "x" + HexFormat.of().formatHex(bytes);
    }
}
