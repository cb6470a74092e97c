// Reads the given topics from their starts with franz-go and prints "topic partition offset value" per record, until
// so many have been read. Resets nothing: an offset out of range ends it.
package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("usage: franz BOOTSTRAP TOPIC[,TOPIC] COUNT")
	}
	count, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	client, err := kgo.NewClient(
		kgo.SeedBrokers(args[0]),
		kgo.ConsumeTopics(strings.Split(args[1], ",")...),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.FetchMaxPartitionBytes(64<<10),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	for read := 0; read < count; {
		fetches := client.PollFetches(ctx)
		for _, one := range fetches.Errors() {
			return fmt.Errorf("%s-%d after %d records: %w", one.Topic, one.Partition, read, one.Err)
		}
		fetches.EachRecord(func(record *kgo.Record) {
			read++
			fmt.Fprintln(out, record.Topic, record.Partition, record.Offset, string(record.Value))
		})
	}
	return nil
}
