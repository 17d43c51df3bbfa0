import java.math.BigDecimal;
import java.math.BigInteger;
import java.time.Instant;
import java.time.LocalDate;
import java.time.LocalDateTime;
import java.time.LocalTime;
import java.time.ZoneOffset;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import java.util.UUID;

/**
 * Prints the hashCode of JDK values as CSV: type, value, hash_code.
 *
 * <p>Values are numbers, so that no reader needs to parse dates: LocalDate is its epoch day;
 * LocalTime its nanosecond of the day; Instant and LocalDateTime are "seconds:nanos" since 1970
 * (the latter at UTC); UUID is its usual text; BigDecimal is "unscaled:scale".
 *
 * <p>Run: {@code java JdkHashes.java | gzip -9n > jdk_hashes.csv.gz} (Java 17).
 */
public final class JdkHashes {
    private static final Random RANDOM = new Random(20240229);

    private static void print(String type, Object value, int hashCode) {
        System.out.println(type + "," + value + "," + hashCode);
    }

    private static long[] days() {
        List<Long> days = new ArrayList<>(List.of(
                0L, 1L, -1L, 58L, 59L, 60L, 19782L, 19783L, -719162L, -719163L, -719528L, -719529L,
                -719468L, -719469L, 10957L, 11016L, 47541L, 2932896L, 2932897L,
                (long) Integer.MIN_VALUE, (long) Integer.MAX_VALUE,
                LocalDate.MIN.toEpochDay(), LocalDate.MAX.toEpochDay()));
        for (int i = 0; i < 400; i++) {
            days.add((long) RANDOM.nextInt(200_000) - 100_000); // 1696 to 2243
            days.add((long) RANDOM.nextInt());
        }
        for (long day = 18993; day < 18993 + 800; day++) {
            days.add(day); // 2022 to 2024, one after the other
        }
        return days.stream().mapToLong(Long::longValue).toArray();
    }

    private static long[][] moments() {
        List<long[]> moments = new ArrayList<>();
        long[] nanos = {0, 1, 999, 1_000, 999_999, 1_000_000, 500_000_000, 999_999_999};
        long[] seconds = {
            0, 1, -1, 59, 86_399, 86_400, -86_400, -86_401, 1_709_164_800, -62_135_596_800L,
            -62_135_596_801L, 253_402_300_799L, 253_402_300_800L, Integer.MIN_VALUE,
            Integer.MAX_VALUE, 1L << 32, -(1L << 32), 9_223_372_036L, -9_223_372_036L
        };
        for (long second : seconds) {
            for (long nano : nanos) {
                moments.add(new long[] {second, nano});
            }
        }
        moments.add(new long[] {Instant.MIN.getEpochSecond(), 0}); // a year beyond LocalDateTime
        moments.add(new long[] {Instant.MAX.getEpochSecond(), 0});
        moments.add(new long[] {LocalDateTime.MIN.toEpochSecond(ZoneOffset.UTC), 0});
        moments.add(new long[] {LocalDateTime.MAX.toEpochSecond(ZoneOffset.UTC), 0});
        for (int i = 0; i < 500; i++) {
            moments.add(new long[] {RANDOM.nextInt(), RANDOM.nextInt(1_000_000_000)});
            moments.add(new long[] {RANDOM.nextLong() >> 24, RANDOM.nextInt(1_000) * 1_000_000L});
            moments.add(new long[] {RANDOM.nextLong() >> 30, RANDOM.nextInt(1_000_000) * 1_000L});
        }
        return moments.toArray(new long[0][]);
    }

    private static long[] nanosOfDay() {
        List<Long> times = new ArrayList<>(List.of(
                0L, 1L, 999L, 1_000L, 1_000_000L, 1_000_000_000L, 60_000_000_000L,
                3_600_000_000_000L, 43_200_000_000_000L, 86_399_000_000_000L, 86_399_999_999_999L));
        for (int i = 0; i < 300; i++) {
            long second = RANDOM.nextInt(86_400) * 1_000_000_000L;
            times.add(second);
            times.add(second + RANDOM.nextInt(1_000) * 1_000_000L);
            times.add(second + RANDOM.nextInt(1_000_000) * 1_000L);
            times.add(second + RANDOM.nextInt(1_000_000_000));
        }
        return times.stream().mapToLong(Long::longValue).toArray();
    }

    private static List<BigInteger> integers() {
        List<BigInteger> integers = new ArrayList<>();
        for (int bits = 0; bits < 127; bits++) { // powers of two and their neighbours
            for (int delta = -1; delta <= 1; delta++) {
                BigInteger value = BigInteger.ONE.shiftLeft(bits).add(BigInteger.valueOf(delta));
                integers.add(value);
                integers.add(value.negate());
            }
            BigInteger random = new BigInteger(bits, RANDOM);
            integers.add(random);
            integers.add(random.negate());
        }
        BigInteger most = BigInteger.TEN.pow(38).subtract(BigInteger.ONE);
        integers.add(most);
        integers.add(most.negate());
        integers.removeIf(value -> value.abs().compareTo(most) > 0);
        return integers;
    }

    public static void main(String[] arguments) {
        System.out.println("type,value,hash_code");
        for (long day : days()) {
            print("LocalDate", day, LocalDate.ofEpochDay(day).hashCode());
        }
        for (long nano : nanosOfDay()) {
            print("LocalTime", nano, LocalTime.ofNanoOfDay(nano).hashCode());
        }
        for (long[] moment : moments()) {
            String value = moment[0] + ":" + moment[1];
            Instant instant = Instant.ofEpochSecond(moment[0], moment[1]);
            print("Instant", value, instant.hashCode());
            long day = Math.floorDiv(moment[0], 86_400L);
            if (day >= LocalDate.MIN.toEpochDay() && day <= LocalDate.MAX.toEpochDay()) {
                LocalDateTime local =
                        LocalDateTime.ofEpochSecond(moment[0], (int) moment[1], ZoneOffset.UTC);
                print("LocalDateTime", value, local.hashCode());
            }
        }
        UUID[] edges = {
            new UUID(0, 0), new UUID(-1, -1), new UUID(Long.MIN_VALUE, Long.MAX_VALUE),
            new UUID(0, 1), UUID.fromString("123e4567-e89b-12d3-a456-426614174000")
        };
        for (UUID uuid : edges) {
            print("UUID", uuid, uuid.hashCode());
        }
        for (int i = 0; i < 300; i++) {
            UUID uuid = new UUID(RANDOM.nextLong(), RANDOM.nextLong());
            print("UUID", uuid, uuid.hashCode());
        }
        int[] scales = {0, 1, 2, 18, 38, -1, -3};
        for (BigInteger integer : integers()) {
            print("BigInteger", integer, integer.hashCode());
            int scale = scales[RANDOM.nextInt(scales.length)];
            print("BigDecimal", integer + ":" + scale, new BigDecimal(integer, scale).hashCode());
        }
    }
}
