// franz-go as a client of the tests. Values to produce are lines of standard input. `topics` prints "topic partition
// offset value" per record of whole topics. The other commands work on partition 0 and print lines of offset,
// timestamp, key, value, headers, with bytes in hex. The client never resets: an offset out of range is exit code 3.
package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

const timeout = 240 * time.Second

func main() {
	out := bufio.NewWriter(os.Stdout)
	err := run(os.Args[1:], out)
	out.Flush()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		if errors.Is(err, kerr.OffsetOutOfRange) {
			os.Exit(3)
		}
		os.Exit(1)
	}
}

func run(args []string, out *bufio.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	switch {
	case len(args) == 4 && args[0] == "topics":
		return topics(ctx, out, args[1], strings.Split(args[2], ","), args[3])
	case len(args) == 3 && args[0] == "produce":
		return produce(ctx, args[1], args[2])
	case len(args) == 5 && args[0] == "transact":
		return transact(ctx, args[1], args[2], args[3], args[4] == "true")
	case len(args) == 6 && args[0] == "consume":
		return consume(ctx, out, args[1], args[2], args[3], args[4], args[5])
	case len(args) == 7 && args[0] == "read":
		return read(ctx, out, args[1], args[2], args[3], args[4], args[5], args[6])
	case len(args) == 4 && args[0] == "offsets":
		return offsets(ctx, out, args[1], args[2], args[3])
	}
	return fmt.Errorf("usage: franz topics|produce|transact|consume|read|offsets BOOTSTRAP TOPIC ...")
}

func connect(bootstrap string, options ...kgo.Opt) (*kgo.Client, error) {
	options = append(options, kgo.SeedBrokers(bootstrap), kgo.ConsumeResetOffset(kgo.NoResetOffset()))
	secured, err := security()
	if err != nil {
		return nil, err
	}
	return kgo.NewClient(append(options, secured...)...)
}

// The user and the certificate authority, from the environment.
func security() ([]kgo.Opt, error) {
	var options []kgo.Opt
	if file := os.Getenv("FRANZ_CA"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		trusted := x509.NewCertPool()
		trusted.AppendCertsFromPEM(text)
		options = append(options, kgo.DialTLSConfig(&tls.Config{RootCAs: trusted}))
	}
	user, secret := os.Getenv("FRANZ_USER"), os.Getenv("FRANZ_SECRET")
	switch mechanism := os.Getenv("FRANZ_MECHANISM"); mechanism {
	case "":
		return options, nil
	case "PLAIN":
		return append(options, kgo.SASL(plain.Auth{User: user, Pass: secret}.AsMechanism())), nil
	case "SCRAM-SHA-256":
		return append(options, kgo.SASL(scram.Auth{User: user, Pass: secret}.AsSha256Mechanism())), nil
	case "SCRAM-SHA-512":
		return append(options, kgo.SASL(scram.Auth{User: user, Pass: secret}.AsSha512Mechanism())), nil
	case "OAUTHBEARER":
		return append(options, kgo.SASL(oauth.Auth{Token: secret}.AsMechanism())), nil
	default:
		return nil, fmt.Errorf("no mechanism %s", mechanism)
	}
}

func isolation(level string) kgo.Opt {
	if level == "read_committed" {
		return kgo.FetchIsolationLevel(kgo.ReadCommitted())
	}
	return kgo.FetchIsolationLevel(kgo.ReadUncommitted())
}

func topics(ctx context.Context, out *bufio.Writer, bootstrap string, names []string, counted string) error {
	client, err := connect(
		bootstrap,
		kgo.ConsumeTopics(names...),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.FetchMaxPartitionBytes(64<<10),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = take(ctx, client, counted, func(record *kgo.Record) {
		fmt.Fprintln(out, record.Topic, record.Partition, record.Offset, string(record.Value))
	})
	return err
}

func produce(ctx context.Context, bootstrap, topic string) error {
	client, err := producer(bootstrap, topic)
	if err != nil {
		return err
	}
	defer client.Close()
	return send(ctx, client)
}

func transact(ctx context.Context, bootstrap, topic, transactionalID string, commit bool) error {
	client, err := producer(bootstrap, topic, kgo.TransactionalID(transactionalID))
	if err != nil {
		return err
	}
	defer client.Close()
	if err := client.BeginTransaction(); err != nil {
		return err
	}
	if err := send(ctx, client); err != nil {
		return err
	}
	return client.EndTransaction(ctx, kgo.TransactionEndTry(commit))
}

func producer(bootstrap, topic string, options ...kgo.Opt) (*kgo.Client, error) {
	options = append(
		options,
		kgo.DefaultProduceTopic(topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.ProducerBatchMaxBytes(4096),
		kgo.ProducerBatchCompression(kgo.NoCompression()),
	)
	return connect(bootstrap, options...)
}

func send(ctx context.Context, client *kgo.Client) error {
	var records []*kgo.Record
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		records = append(records, &kgo.Record{Value: append([]byte(nil), lines.Bytes()...)})
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return client.ProduceSync(ctx, records...).FirstErr()
}

func consume(ctx context.Context, out *bufio.Writer, bootstrap, topic, group, counted, level string) error {
	client, err := connect(
		bootstrap,
		isolation(level),
		kgo.ConsumerGroup(group),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	last, err := take(ctx, client, counted, func(record *kgo.Record) { print(out, record) })
	if err != nil {
		return err
	}
	return client.CommitRecords(ctx, last)
}

func read(ctx context.Context, out *bufio.Writer, bootstrap, topic, at, counted, level, most string) error {
	offset, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return err
	}
	maxBytes, err := strconv.ParseInt(most, 10, 32)
	if err != nil {
		return err
	}
	start := map[string]map[int32]kgo.Offset{topic: {0: kgo.NewOffset().At(offset)}}
	limit := kgo.FetchMaxPartitionBytes(int32(maxBytes))
	client, err := connect(bootstrap, isolation(level), kgo.ConsumePartitions(start), limit)
	if err != nil {
		return err
	}
	defer client.Close()
	_, err = take(ctx, client, counted, func(record *kgo.Record) { print(out, record) })
	return err
}

// Reads the first `counted` records. Returns the last one.
func take(ctx context.Context, client *kgo.Client, counted string, each func(*kgo.Record)) (*kgo.Record, error) {
	count, err := strconv.Atoi(counted)
	if err != nil {
		return nil, err
	}
	var last *kgo.Record
	for taken := 0; taken < count; {
		fetches := client.PollRecords(ctx, count-taken)
		for _, one := range fetches.Errors() {
			return nil, fmt.Errorf("%s-%d after %d records: %w", one.Topic, one.Partition, taken, one.Err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			taken++
			last = record
			each(record)
		})
	}
	return last, nil
}

func offsets(ctx context.Context, out *bufio.Writer, bootstrap, topic, at string) error {
	timestamp, err := strconv.ParseInt(at, 10, 64)
	if err != nil {
		return err
	}
	client, err := connect(bootstrap)
	if err != nil {
		return err
	}
	defer client.Close()
	found := make([]any, 0, 3)
	for _, asked := range []int64{-2, -1, timestamp} {
		request := kmsg.NewPtrListOffsetsRequest()
		request.ReplicaID = -1
		partition := kmsg.NewListOffsetsRequestTopicPartition()
		partition.Timestamp = asked
		one := kmsg.NewListOffsetsRequestTopic()
		one.Topic, one.Partitions = topic, append(one.Partitions, partition)
		request.Topics = append(request.Topics, one)
		response, err := request.RequestWith(ctx, client)
		if err != nil {
			return err
		}
		answer := response.Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
			return err
		}
		found = append(found, answer.Offset)
	}
	fmt.Fprintln(out, found...)
	return nil
}

func print(out *bufio.Writer, record *kgo.Record) {
	fmt.Fprint(out, record.Offset, " ", record.Timestamp.UnixMilli(), " ", text(record.Key), " ", text(record.Value))
	for _, header := range record.Headers {
		fmt.Fprint(out, " ", header.Key, "=", text(header.Value))
	}
	fmt.Fprintln(out)
}

func text(bytes []byte) string {
	if bytes == nil {
		return "null"
	}
	return "x" + hex.EncodeToString(bytes)
}
