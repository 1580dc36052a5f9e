//! Defines the rows of exports and of replicas.

use serde::Serialize;

/// An export of a disk that nobody writes, beside the rates of what it is on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ExportRow {
    pub(super) workload: String,
    pub(super) system: String,
    pub(super) parameters: ExportParameters,
    /// The repeat, from 1.
    pub(super) repeat: u32,
    pub(super) outcome: String,
    /// Bytes written to all devices.
    pub(super) device_bytes: Option<u64>,
    /// Time to read the image, in one thread, from the cold cache: the less one of two, as the next
    /// ones.
    pub(super) read_ms: Option<f64>,
    /// Time to write as many bytes as the devices have, and to make them durable.
    pub(super) write_ms: Option<f64>,
    /// Time to do both at the same time, as an export does: here all is on one disk.
    pub(super) both_ms: Option<f64>,
    /// Time of the export until all of it is durable.
    pub(super) export_ms: Option<f64>,
    /// Time to read it back, and to write the seal.
    pub(super) seal_ms: Option<f64>,
    /// Processor time of the export until all of it is durable, without that of the seal.
    pub(super) export_cpu_s: Option<f64>,
    /// Bytes of the image per second of the reading.
    pub(super) read_bytes_per_s: Option<f64>,
    /// Bytes of the devices per second of the writing.
    pub(super) device_write_bytes_per_s: Option<f64>,
    /// Bytes of the image per second of the writing of what the export makes of it.
    pub(super) write_image_bytes_per_s: Option<f64>,
    /// Bytes of the image per second of the export, without the seal.
    pub(super) export_bytes_per_s: Option<f64>,
    /// Bytes of the image per second of the export and the seal.
    pub(super) sealed_bytes_per_s: Option<f64>,
    /// The rate of the export relative to the slower of reading and writing, all in bytes of the
    /// image.
    pub(super) export_vs_slower: Option<f64>,
    /// The same relative to reading and writing at the same time.
    pub(super) export_vs_both: Option<f64>,
}

/// The parameters of an export.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ExportParameters {
    pub(super) image_bytes: u64,
    /// The parts of the image: random bytes, text, zeros.
    pub(super) content: &'static str,
    pub(super) devices: usize,
    /// The number of them that may be lost.
    pub(super) parity: u8,
    /// Bytes of one read or write of the plain reading and writing.
    pub(super) block_bytes: u64,
}

/// A guest that writes as fast as it can, and replicas of its disk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ConsolidationRow {
    pub(super) workload: String,
    pub(super) system: String,
    pub(super) parameters: ConsolidationParameters,
    /// The repeat, from 1.
    pub(super) repeat: u32,
    /// `completed`, or `failed: why`.
    pub(super) outcome: String,
    /// The guest's operations per second before anything is done with its disk.
    pub(super) work_before_per_s: Option<f64>,
    /// The same over the whole period.
    pub(super) work_during_per_s: Option<f64>,
    /// The same while replicas are made.
    pub(super) work_in_replicas_per_s: Option<f64>,
    /// `work_during_per_s` relative to that of the guest that is left alone.
    pub(super) throughput_vs_none: Option<f64>,
    /// `work_in_replicas_per_s` relative to `work_during_per_s` of the guest that is left alone.
    pub(super) in_replicas_vs_none: Option<f64>,
    /// The longest time within the period in which the guest completed no operation.
    pub(super) longest_silence_ms: Option<f64>,
    /// The time of the first, full copy, before the period.
    pub(super) first_copy_ms: Option<f64>,
    pub(super) replicas: Vec<Replica>,
    /// Operations of each second of the period.
    pub(super) operations_per_second: Vec<u64>,
    /// Errors found by the guest and, in its disk, from outside.
    pub(super) verify_errors: Option<u64>,
}

/// A replica.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Replica {
    /// When it was begun, since the beginning of the period.
    pub(super) began_ms: f64,
    /// Null if it was given up.
    pub(super) took_ms: Option<f64>,
    /// Bytes written to the replica.
    pub(super) copied_bytes: Option<u64>,
    /// Whether it is of one moment.
    pub(super) is_consistent: Option<bool>,
    /// The guest's operations per second meanwhile.
    pub(super) work_per_s: Option<f64>,
    pub(super) longest_silence_ms: f64,
}

/// The parameters of the guest and of its replicas.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct ConsolidationParameters {
    pub(super) file_bytes: u64,
    pub(super) block_bytes: u64,
    /// The number of requests under way at a time.
    pub(super) depth: u32,
    pub(super) replicas: usize,
    pub(super) every_ms: u64,
    pub(super) machine: String,
    pub(super) guest_memory_bytes: u64,
}

/// Shows a value of a row.
pub(super) fn number(value: Option<f64>, unit: &str) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
}

fn share(value: Option<f64>) -> String {
    number(value.map(|share| share * 100.0), "%")
}

impl ExportRow {
    /// Computes the rates from the times.
    pub(super) fn compute(&mut self) {
        let image = self.parameters.image_bytes as f64;
        let per_s = |bytes: f64, ms: Option<f64>| Some(bytes / ms?.max(0.001) * 1e3);
        self.read_bytes_per_s = per_s(image, self.read_ms);
        self.write_image_bytes_per_s = per_s(image, self.write_ms);
        let device = self.device_bytes.map(|bytes| bytes as f64);
        self.device_write_bytes_per_s = device.and_then(|bytes| per_s(bytes, self.write_ms));
        self.export_bytes_per_s = per_s(image, self.export_ms);
        let both = self.export_ms.zip(self.seal_ms).map(|(a, b)| a + b);
        self.sealed_bytes_per_s = per_s(image, both);
        let slower = self.read_bytes_per_s.zip(self.write_image_bytes_per_s);
        let slower = slower.map(|(read, write)| read.min(write));
        self.export_vs_slower = self
            .export_bytes_per_s
            .zip(slower)
            .map(|(own, it)| own / it);
        let both = self.both_ms.zip(self.export_ms);
        self.export_vs_both = both.map(|(both, own)| both / own.max(0.001));
    }

    /// Returns it as one line.
    pub(super) fn show(&self) -> String {
        let rate = |value: Option<f64>| number(value.map(|it| it / 1e6), "MB/s");
        format!(
            "export to {} devices, repeat {}: {} of the image, {} with the seal; reading {}, \
             writing what the devices have {} of the image ({} of devices), {} of the slower, {} \
             of both at the same time, {} of processors",
            self.parameters.devices,
            self.repeat,
            rate(self.export_bytes_per_s),
            rate(self.sealed_bytes_per_s),
            rate(self.read_bytes_per_s),
            rate(self.write_image_bytes_per_s),
            rate(self.device_write_bytes_per_s),
            share(self.export_vs_slower),
            share(self.export_vs_both),
            number(self.export_cpu_s, "s"),
        )
    }
}

impl ConsolidationRow {
    /// Compares it with the guest that is left alone.
    pub(super) fn compare(&mut self, none: Option<f64>) {
        let relative = |own: Option<f64>| Some(own? / none?);
        self.throughput_vs_none = relative(self.work_during_per_s);
        self.in_replicas_vs_none = relative(self.work_in_replicas_per_s);
    }

    /// Returns it as one line.
    pub(super) fn show(&self) -> String {
        let times: Vec<String> = self
            .replicas
            .iter()
            .map(|it| number(it.took_ms.map(|ms| ms / 1e3), "s"))
            .collect();
        let copied = self.replicas.iter().filter_map(|it| it.copied_bytes);
        format!(
            "{:<14} {:<9} repeat {}: {} before, {} in all, {} in replicas ({} and {} of one that \
             is left alone), silent for {} at most, replicas took [{}] and {}, errors {}, {}",
            self.system,
            self.workload,
            self.repeat,
            number(self.work_before_per_s, "/s"),
            number(self.work_during_per_s, "/s"),
            number(self.work_in_replicas_per_s, "/s"),
            share(self.throughput_vs_none),
            share(self.in_replicas_vs_none),
            number(self.longest_silence_ms, "ms"),
            times.join(", "),
            number(Some(copied.sum::<u64>() as f64 / 1e6), "MB"),
            self.verify_errors
                .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
            self.outcome,
        )
    }
}
