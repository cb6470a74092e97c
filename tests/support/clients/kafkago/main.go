// kafka-go as a client of the tests. It reads and writes partition 0 and prints lines of offset, timestamp, key, value, headers,
// with bytes in hex. The client never resets: an offset out of range is exit code 3.
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

	"github.com/segmentio/kafka-go"
)

const timeout = 240 * time.Second
const mostBytes = 1 << 20

func main() {
	out := bufio.NewWriter(os.Stdout)
	err := run(os.Args[1:], out)
	out.Flush()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		if errors.Is(err, kafka.OffsetOutOfRange) {
			os.Exit(3)
		}
		os.Exit(1)
	}
}

func run(args []string, out *bufio.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	switch {
	case len(args) == 7 && args[0] == "read":
		return read(ctx, out, args[1], args[2], args[3], args[4], args[5], args[6])
	case len(args) == 6 && args[0] == "read-to":
		return readTo(ctx, out, args[1], args[2], args[3], args[4], args[5])
	case len(args) == 4 && args[0] == "produce":
		return produce(ctx, args[1], args[2], args[3])
	case len(args) == 5 && args[0] == "member":
		return member(out, args[1], args[2], args[3], args[4])
	}
	return fmt.Errorf("usage: kafkago read BOOTSTRAP TOPIC OFFSET COUNT ISOLATION BYTES | read-to BOOTSTRAP TOPIC OFFSET END ISOLATION" +
		" | produce BOOTSTRAP TOPIC CODEC | member BOOTSTRAP TOPIC GROUP END")
}

// Writes the lines of the standard input, each as one record, with acks=all.
func produce(ctx context.Context, bootstrap, topic, codec string) error {
	var compression kafka.Compression
	if codec != "none" {
		if err := compression.UnmarshalText([]byte(codec)); err != nil {
			return err
		}
	}
	writer := &kafka.Writer{
		Addr:         kafka.TCP(bootstrap),
		Topic:        topic,
		RequiredAcks: kafka.RequireAll,
		Compression:  compression,
		BatchSize:    20,
		BatchTimeout: 10 * time.Millisecond,
		MaxAttempts:  100,
	}
	defer writer.Close()
	var messages []kafka.Message
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		messages = append(messages, kafka.Message{Value: append([]byte(nil), lines.Bytes()...)})
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return writer.WriteMessages(ctx, messages...)
}

// Reads in a group up to the offset before `end`. It prints "joined N" for the Nth generation that it joins, and
// "record OFFSET" for each record, at once. `Reader.ReadMessage` would lose a message whose commit exceeds the deadline.
func member(out *bufio.Writer, bootstrap, topic, group, end string) error {
	last, err := strconv.ParseInt(end, 10, 64)
	if err != nil {
		return err
	}
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers:           []string{bootstrap},
		GroupID:           group,
		Topic:             topic,
		StartOffset:       kafka.FirstOffset,
		MaxWait:           500 * time.Millisecond,
		SessionTimeout:    10 * time.Second,
		HeartbeatInterval: time.Second,
	})
	defer reader.Close()
	joined := int64(0)
	tell := func() {
		for n := reader.Stats().Rebalances; n > 0; n-- {
			joined++
			fmt.Fprintln(out, "joined", joined)
		}
		out.Flush()
	}
	for {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		message, err := reader.FetchMessage(ctx)
		cancel()
		tell()
		if errors.Is(err, context.DeadlineExceeded) {
			continue
		}
		if err != nil {
			return err
		}
		fmt.Fprintln(out, "record", message.Offset)
		out.Flush()
		if err := reader.CommitMessages(context.Background(), message); err != nil {
			return err
		}
		if message.Offset >= last-1 {
			return nil
		}
	}
}

func isolation(level string) kafka.IsolationLevel {
	if level == "read_committed" {
		return kafka.ReadCommitted
	}
	return kafka.ReadUncommitted
}

// Reads with a Reader, which fetches ahead.
func read(ctx context.Context, out *bufio.Writer, bootstrap, topic, at, counted, level, most string) error {
	offset, count, err := twoNumbers(at, counted)
	if err != nil {
		return err
	}
	maxBytes, err := strconv.Atoi(most)
	if err != nil {
		return err
	}
	reader := kafka.NewReader(kafka.ReaderConfig{
		Brokers:               []string{bootstrap},
		Topic:                 topic,
		Partition:             0,
		MaxBytes:              maxBytes,
		MaxWait:               500 * time.Millisecond,
		IsolationLevel:        isolation(level),
		OffsetOutOfRangeError: true,
	})
	defer reader.Close()
	if err := reader.SetOffset(offset); err != nil {
		return err
	}
	for taken := int64(0); taken < count; taken++ {
		message, err := reader.ReadMessage(ctx)
		if err != nil {
			return fmt.Errorf("after %d messages: %w", taken, err)
		}
		print(out, message)
	}
	return nil
}

// Reads with a Conn. A Reader does not tell its position, a Conn does.
func readTo(ctx context.Context, out *bufio.Writer, bootstrap, topic, at, until, level string) error {
	offset, end, err := twoNumbers(at, until)
	if err != nil {
		return err
	}
	connection, err := kafka.DialLeader(ctx, "tcp", bootstrap, topic, 0)
	if err != nil {
		return err
	}
	defer connection.Close()
	if _, err := connection.Seek(offset, kafka.SeekAbsolute|kafka.SeekDontCheck); err != nil {
		return err
	}
	for {
		if position, _ := connection.Offset(); position >= end {
			return nil
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		err := readBatch(connection, out, level)
		if errors.Is(err, kafka.ReplicaNotAvailable) {
			time.Sleep(100 * time.Millisecond) // a Conn leaves the retry to its caller
			continue
		}
		if err != nil {
			return err
		}
	}
}

func readBatch(connection *kafka.Conn, out *bufio.Writer, level string) error {
	connection.SetReadDeadline(time.Now().Add(30 * time.Second))
	batch := connection.ReadBatchWith(kafka.ReadBatchConfig{
		MinBytes:       1,
		MaxBytes:       mostBytes,
		MaxWait:        500 * time.Millisecond,
		IsolationLevel: isolation(level),
	})
	for {
		message, err := batch.ReadMessage()
		if err != nil {
			return batch.Close()
		}
		print(out, message)
	}
}

func twoNumbers(first, second string) (int64, int64, error) {
	a, err := strconv.ParseInt(first, 10, 64)
	if err != nil {
		return 0, 0, err
	}
	b, err := strconv.ParseInt(second, 10, 64)
	return a, b, err
}

func print(out *bufio.Writer, message kafka.Message) {
	fmt.Fprint(out, message.Offset, " ", message.Time.UnixMilli(), " ", text(message.Key), " ", text(message.Value))
	for _, header := range message.Headers {
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
