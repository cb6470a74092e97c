// Sarama as a client of the tests. It reads and writes partition 0 with the protocol of the Kafka version that the first
// argument names. It prints lines of offset, timestamp, key, value, headers, with bytes in hex. The client never resets:
// an offset out of range is exit code 3.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/IBM/sarama"
)

const timeout = 240 * time.Second

func main() {
	out := bufio.NewWriter(os.Stdout)
	err := run(os.Args[1:], out)
	out.Flush()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		if errors.Is(err, sarama.ErrOffsetOutOfRange) {
			os.Exit(3)
		}
		os.Exit(1)
	}
}

func run(args []string, out *bufio.Writer) error {
	if len(args) < 4 {
		return fmt.Errorf("usage: sarama VERSION produce|read|offsets|member BOOTSTRAP TOPIC ...")
	}
	config, err := configured(args[0])
	if err != nil {
		return err
	}
	command, bootstrap, topic, rest := args[1], args[2], args[3], args[4:]
	switch {
	case command == "produce" && len(rest) == 1:
		return produce(config, bootstrap, topic, rest[0])
	case command == "read" && len(rest) == 4:
		return read(config, out, bootstrap, topic, rest[0], rest[1], rest[2], rest[3])
	case command == "offsets" && len(rest) == 1:
		return offsets(config, out, bootstrap, topic, rest[0])
	case command == "member" && len(rest) == 2:
		return member(config, out, bootstrap, topic, rest[0], rest[1])
	}
	return fmt.Errorf("unknown command or wrong number of arguments: %v", args)
}

func configured(version string) (*sarama.Config, error) {
	config := sarama.NewConfig()
	config.Version = sarama.MaxVersion
	if version != "newest" {
		parsed, err := sarama.ParseKafkaVersion(version)
		if err != nil {
			return nil, err
		}
		config.Version = parsed
	}
	config.ApiVersionsRequest = version == "newest"
	config.Consumer.Return.Errors = true
	config.Consumer.MaxWaitTime = 500 * time.Millisecond
	config.Metadata.Retry.Max = 100
	return config, nil
}

// Writes the lines of the standard input, each as one record, idempotently and with acks=all.
func produce(config *sarama.Config, bootstrap, topic, codec string) error {
	if err := config.Producer.Compression.UnmarshalText([]byte(codec)); err != nil {
		return err
	}
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Idempotent = true
	config.Net.MaxOpenRequests = 1
	config.Producer.Return.Successes = true
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.Flush.MaxMessages = 20
	config.Producer.Retry.Max = 100
	producer, err := sarama.NewSyncProducer([]string{bootstrap}, config)
	if err != nil {
		return err
	}
	defer producer.Close()
	var messages []*sarama.ProducerMessage
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		value := append(sarama.ByteEncoder(nil), lines.Bytes()...)
		messages = append(messages, &sarama.ProducerMessage{Topic: topic, Value: value})
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return producer.SendMessages(messages)
}

func read(config *sarama.Config, out *bufio.Writer, bootstrap, topic, at, counted, level, most string) error {
	offset, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return err
	}
	count, err := strconv.Atoi(counted)
	if err != nil {
		return err
	}
	bytes, err := strconv.Atoi(most)
	if err != nil {
		return err
	}
	if level == "read_committed" {
		config.Consumer.IsolationLevel = sarama.ReadCommitted
	}
	config.Consumer.Fetch.Default = int32(bytes)
	consumer, err := sarama.NewConsumer([]string{bootstrap}, config)
	if err != nil {
		return err
	}
	defer consumer.Close()
	partition, err := consumer.ConsumePartition(topic, 0, offset)
	if err != nil {
		return err
	}
	defer partition.AsyncClose()
	end := time.After(timeout)
	for taken := 0; taken < count; {
		select {
		case message := <-partition.Messages():
			print(out, message)
			taken++
		case err := <-partition.Errors():
			return fmt.Errorf("after %d messages: %w", taken, err)
		case <-end:
			return fmt.Errorf("only %d messages in %s", taken, timeout)
		}
	}
	return nil
}

// Prints the earliest and the latest offset, and the first one at or after a timestamp.
func offsets(config *sarama.Config, out *bufio.Writer, bootstrap, topic, timestamp string) error {
	at, err := strconv.ParseInt(timestamp, 10, 64)
	if err != nil {
		return err
	}
	client, err := sarama.NewClient([]string{bootstrap}, config)
	if err != nil {
		return err
	}
	defer client.Close()
	for _, time := range []int64{sarama.OffsetOldest, sarama.OffsetNewest, at} {
		offset, err := client.GetOffset(topic, 0, time)
		if err != nil {
			return err
		}
		fmt.Fprint(out, offset, " ")
	}
	fmt.Fprintln(out)
	return nil
}

// Reads in a group up to the offset before `end`. It prints "joined GENERATION" for each generation that it joins, and
// "record OFFSET" for each record, at once.
func member(config *sarama.Config, out *bufio.Writer, bootstrap, topic, group, end string) error {
	last, err := strconv.ParseInt(end, 10, 64)
	if err != nil {
		return err
	}
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Group.Session.Timeout = 10 * time.Second
	config.Consumer.Group.Heartbeat.Interval = time.Second
	joined, err := sarama.NewConsumerGroup([]string{bootstrap}, group, config)
	if err != nil {
		return err
	}
	defer joined.Close()
	go func() {
		for err := range joined.Errors() {
			fmt.Fprintln(os.Stderr, err)
		}
	}()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	reading := &reading{out: out, last: last - 1, done: cancel}
	for ctx.Err() == nil {
		if err := joined.Consume(ctx, []string{topic}, reading); err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

type reading struct {
	out  *bufio.Writer
	last int64
	done func()
}

func (r *reading) Setup(session sarama.ConsumerGroupSession) error {
	fmt.Fprintln(r.out, "joined", session.GenerationID())
	return r.out.Flush()
}

func (r *reading) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (r *reading) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for message := range claim.Messages() {
		fmt.Fprintln(r.out, "record", message.Offset)
		r.out.Flush()
		session.MarkMessage(message, "")
		if message.Offset >= r.last {
			r.done()
			return nil
		}
	}
	return nil
}

func print(out *bufio.Writer, message *sarama.ConsumerMessage) {
	fmt.Fprint(out, message.Offset, " ", message.Timestamp.UnixMilli(), " ", text(message.Key), " ", text(message.Value))
	for _, header := range message.Headers {
		fmt.Fprint(out, " ", string(header.Key), "=", text(header.Value))
	}
	fmt.Fprintln(out)
}

func text(bytes []byte) string {
	if bytes == nil {
		return "null"
	}
	return "x" + hex.EncodeToString(bytes)
}
