package org.apache.spark.kafka010;

import java.util.Map;
import org.apache.spark.SparkConf;
import scala.Option;

/** No cluster has delegation tokens, so none is ever renewed. */
public final class KafkaTokenUtil$ {
    public static final KafkaTokenUtil$ MODULE$ = new KafkaTokenUtil$();

    public Option<?> findMatchingTokenClusterConfig(SparkConf conf, String bootstrapServers) {
        return Option.empty();
    }

    public boolean needTokenUpdate(Map<?, ?> settings, Option<?> cluster) {
        return false;
    }
}
