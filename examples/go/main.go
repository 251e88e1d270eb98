// The same chat by gRPC from Go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"

	pb "example.com/specdecode/v1"
)

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if err := run(address); err != nil {
		log.Fatal(err)
	}
}

func run(address string) error {
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()

	message := &pb.ChatMessage{Role: "user", Content: "Why is the sky blue?"}
	stream, err := pb.NewRouterServiceClient(connection).Generate(ctx, &pb.GenerateRequest{
		Prompt: &pb.GenerateRequest_Chat{Chat: &pb.ChatPrompt{Messages: []*pb.ChatMessage{message}}},
		Sampling: &pb.SamplingOptions{
			MaxTokens:   proto.Uint32(64),
			Temperature: proto.Float32(0.7),
			Seed:        proto.Uint64(7),
		},
	})
	if err != nil {
		return err
	}
	for {
		piece, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(piece.Text)
		if usage := piece.Usage; usage != nil {
			fmt.Printf("\n%d tokens in %d rounds; %d were drafted\n",
				usage.NumEmitted, usage.NumRounds, usage.NumAccepted)
		}
	}
}
