import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * A member of a share group. A command is a line of words on standard input. The answer is a line per record
 * (partition, offset, delivery count, value in hex) and a last line: OK or ERROR.
 */
public final class ShareMember {
    private static final PrintStream OUT = new PrintStream(System.out, false, StandardCharsets.UTF_8);
    private static final long TIMEOUT_NS = Duration.ofSeconds(240).toNanos();

    private static KafkaShareConsumer<byte[], byte[]> consumer;
    private static final List<ConsumerRecord<byte[], byte[]>> acquired = new ArrayList<>();

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

    private static void run(String[] args) {
        switch (args[0]) {
            case "join" -> join(args[1], args[2], args[3]);
            case "acquire" -> acquire();
            case "accept" -> accept();
            case "leave" -> consumer.close();
            default -> throw new IllegalArgumentException(args[0]);
        }
    }

    private static void join(String bootstrap, String group, String topic) {
        var settings = new Properties();
        settings.put("bootstrap.servers", bootstrap);
        settings.put("group.id", group);
        settings.put("share.acknowledgement.mode", "explicit");
        settings.put("metadata.max.age.ms", "1000");
        consumer = new KafkaShareConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
        consumer.subscribe(List.of(topic));
        acquired.clear();
    }

    /** Polls for some records. */
    private static void acquire() {
        acquired.clear();
        for (long began = System.nanoTime(); acquired.isEmpty(); ) {
            if (System.nanoTime() - began > TIMEOUT_NS) throw new IllegalStateException("no record came");
            consumer.poll(Duration.ofMillis(500)).forEach(acquired::add);
        }
        for (var one : acquired) {
            var value = HexFormat.of().formatHex(one.value());
            OUT.println(one.partition() + " " + one.offset() + " " + value);
        }
    }

    private static void accept() {
        acquired.forEach(one -> consumer.acknowledge(one, AcknowledgeType.ACCEPT));
        acquired.clear();
        consumer.commitSync().forEach((partition, error) -> error.ifPresent(one -> {
            throw new KafkaException(partition + " was not acknowledged", one);
        }));
    }
}
