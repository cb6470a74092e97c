import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import org.apache.kafka.common.utils.Exit;

/**
 * Runs Kafka's command-line tools one after the other in one process. A line on standard input is a tool's class, its
 * standard input in base64 and its arguments, all separated by tabs. The answer is the tool's exit code, its standard
 * output and its standard error, each in base64, and then OK.
 */
public final class ToolRunner {
    /** The stream that a tool writes to. scala.Console keeps the first stream that it sees, so it never changes. */
    private static final class Captured extends OutputStream {
        private ByteArrayOutputStream bytes = new ByteArrayOutputStream();

        @Override
        public synchronized void write(int one) {
            bytes.write(one);
        }

        @Override
        public synchronized void write(byte[] many, int from, int count) {
            bytes.write(many, from, count);
        }

        synchronized String taken() throws IOException {
            var taken = Base64.getEncoder().encodeToString(bytes.toByteArray());
            bytes = new ByteArrayOutputStream();
            return taken;
        }
    }

    private static final class Exited extends Error {
        Exited() {
            super(null, null, false, false);
        }
    }

    private static final List<Runnable> SHUTDOWN_HOOKS = new ArrayList<>();
    private static Integer exitCode;

    public static void main(String[] args) throws Exception {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        var answers = new PrintStream(new FileOutputStream(FileDescriptor.out), false, StandardCharsets.UTF_8);
        var output = new Captured();
        var errors = new Captured();
        System.setOut(new PrintStream(output, true, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(errors, true, StandardCharsets.UTF_8));
        Exit.setExitProcedure((code, message) -> exit(code));
        Exit.setHaltProcedure((code, message) -> exit(code));
        Exit.setShutdownHookAdder((name, hook) -> SHUTDOWN_HOOKS.add(hook));
        for (String line; (line = lines.readLine()) != null; ) {
            var words = List.of(line.split("\t", -1));
            exitCode = null;
            System.setIn(new ByteArrayInputStream(Base64.getDecoder().decode(words.get(1))));
            run(words.get(0), words.subList(2, words.size()).toArray(String[]::new));
            SHUTDOWN_HOOKS.forEach(Runnable::run);
            SHUTDOWN_HOOKS.clear();
            answers.println(exitCode == null ? 0 : exitCode);
            answers.println(output.taken());
            answers.println(errors.taken());
            answers.println("OK");
            answers.flush();
        }
    }

    private static void exit(int code) {
        if (exitCode == null) {
            exitCode = code;
        }
        throw new Exited();
    }

    private static void run(String tool, String[] args) throws ReflectiveOperationException {
        try {
            Class.forName(tool).getMethod("main", String[].class).invoke(null, (Object) args);
        } catch (InvocationTargetException thrown) {
            if (!(thrown.getCause() instanceof Exited)) {
                thrown.getCause().printStackTrace();
                exitCode = exitCode == null ? 1 : exitCode;
            }
        }
    }
}
