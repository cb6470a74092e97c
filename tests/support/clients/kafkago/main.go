// kafka-go as a client of the tests. It reads partition 0 and prints lines of offset, timestamp, key, value, headers,
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
	}
	return fmt.Errorf("usage: kafkago read BOOTSTRAP TOPIC OFFSET COUNT ISOLATION BYTES | read-to BOOTSTRAP TOPIC OFFSET END ISOLATION")
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
		if err := readBatch(connection, out, level); err != nil {
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
