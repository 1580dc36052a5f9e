//! Rows on their way to the devices.

use crate::cell::Cell;
use crate::device::Device;
use crate::writer::{WriteError, in_parallel, io_of};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, SendError, SyncSender};
use std::thread::{self, JoinHandle};

/// Cells of all devices that wait to be written: as many as are encrypted while a device is slower
/// than usual.
const CELLS_AHEAD: usize = 8;

/// A row that is complete.
pub(crate) struct Ready {
    pub(crate) row: u64,
    /// The cells, with the numbers of their devices.
    pub(crate) cells: Vec<(usize, Cell)>,
    /// Whether all devices are synced when it is written, and before the next one is.
    pub(crate) syncs: bool,
}

/// Writes rows in their order, while others are encrypted: devices do not wait for processors, nor
/// these for them.
pub(crate) struct Queue {
    devices: Arc<Vec<Device>>,
    writing: Option<Writing>,
    /// Whether a row could not be written, or a device not be synced: what the devices have then is
    /// not known, and nothing later is durable either.
    has_failed: bool,
}

/// A thread that writes rows until one fails, or no more come.
struct Writing {
    ready: SyncSender<Ready>,
    written: Receiver<Result<Ready, WriteError>>,
    thread: JoinHandle<()>,
}

impl Writing {
    fn begin(devices: &Arc<Vec<Device>>) -> Self {
        let ahead = (CELLS_AHEAD / devices.len().max(1)).max(1);
        let (ready, rows) = mpsc::sync_channel::<Ready>(ahead);
        let (sender, written) = mpsc::channel();
        let devices = Arc::clone(devices);
        let thread = thread::spawn(move || {
            for ready in rows {
                let done = write_ready(&devices, &ready);
                let is_last = done.is_err();
                // Without a receiver the rows before it are not waited for, and it is.
                let _ = sender.send(done.map(|()| ready));
                if is_last {
                    return;
                }
            }
        });
        Self {
            ready,
            written,
            thread,
        }
    }
}

impl Queue {
    /// Prepares to write these devices.
    pub(crate) fn of(devices: Vec<Device>) -> Self {
        Self {
            devices: Arc::new(devices),
            writing: None,
            has_failed: false,
        }
    }

    /// Returns the devices.
    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// Gives the devices away, without rows that are not written.
    pub(crate) fn take_devices(&mut self) -> Vec<Device> {
        self.stop();
        // No thread has them any more.
        Arc::into_inner(std::mem::take(&mut self.devices)).unwrap_or_default()
    }

    /// Adds a row, and waits if there are enough. Cells that were written become spare.
    ///
    /// # Errors
    /// When an earlier row could not be written.
    pub(crate) fn push(&mut self, ready: Ready, spare: &mut Vec<Cell>) -> Result<(), WriteError> {
        self.unless_failed(|queue| {
            let devices = &queue.devices;
            let begin = || Writing::begin(devices);
            let writing = queue.writing.get_or_insert_with(begin);
            match writing.ready.send(ready) {
                Ok(()) => {
                    for written in writing.written.try_iter() {
                        keep(written?, spare);
                    }
                    Ok(())
                }
                // The thread has ended, and says why.
                Err(SendError(ready)) => {
                    queue.wait(spare)?;
                    write_ready(&queue.devices, &ready)
                }
            }
        })
    }

    /// Writes all rows, and syncs all devices.
    ///
    /// # Errors
    /// When that fails, or an earlier row could not be written.
    pub(crate) fn sync(&mut self, spare: &mut Vec<Cell>) -> Result<(), WriteError> {
        self.unless_failed(|queue| {
            queue.wait(spare)?;
            sync(&queue.devices)
        })
    }

    fn unless_failed(
        &mut self,
        act: impl FnOnce(&mut Self) -> Result<(), WriteError>,
    ) -> Result<(), WriteError> {
        if self.has_failed {
            return Err(WriteError::Failed);
        }
        let done = act(self);
        self.has_failed = done.is_err();
        done
    }

    /// Waits until all rows are written.
    fn wait(&mut self, spare: &mut Vec<Cell>) -> Result<(), WriteError> {
        let Some(writing) = self.writing.take() else {
            return Ok(());
        };
        drop(writing.ready);
        let mut all = Ok(());
        for written in writing.written {
            match written {
                Ok(ready) => keep(ready, spare),
                Err(error) => all = Err(error),
            }
        }
        // A thread that panics says so itself.
        let ended = writing.thread.join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        all
    }

    /// Lets the thread end, if there is one.
    fn stop(&mut self) {
        if let Some(writing) = self.writing.take() {
            drop((writing.ready, writing.written));
            // Whatever was not waited for may have failed.
            let _ = writing.thread.join();
        }
    }
}

impl Drop for Queue {
    /// Nothing is written later: the devices may be opened again.
    fn drop(&mut self) {
        self.stop();
    }
}

/// Keeps the memory of cells that are written.
fn keep(ready: Ready, spare: &mut Vec<Cell>) {
    spare.extend(ready.cells.into_iter().map(|(_, cell)| cell));
}

fn write_ready(devices: &[Device], ready: &Ready) -> Result<(), WriteError> {
    write_cells(devices, ready.row, &ready.cells)?;
    match ready.syncs {
        true => sync(devices),
        false => Ok(()),
    }
}

/// Writes cells of a row, those of different devices at the same time.
pub(crate) fn write_cells(
    devices: &[Device],
    row: u64,
    cells: &[(usize, Cell)],
) -> Result<(), WriteError> {
    in_parallel(cells, |(number, cell)| {
        let device = devices.get(*number).ok_or(WriteError::Full)?;
        device.write(row, cell).map_err(io_of(*number, device))
    })?;
    Ok(())
}

/// Syncs all devices, at the same time.
fn sync(devices: &[Device]) -> Result<(), WriteError> {
    in_parallel(devices.iter().enumerate(), |(number, device)| {
        device.sync().map_err(io_of(number, device))
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cell::{CELL_BYTES, Kind, Name};
    use std::fs;

    fn ready(row: u64, device: usize) -> Ready {
        let name = Name {
            kind: Kind::Data,
            device: device as u16,
            row,
            parcel: [7; 8],
            generation: 1,
        };
        let mut cell = Cell::new();
        cell.finish(&name);
        Ready {
            row,
            cells: vec![(device, cell)],
            syncs: row.is_multiple_of(3),
        }
    }

    #[test]
    fn rows_are_written_in_order_and_their_memory_is_used_again() {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::create(folder.path(), "rows", Some(1 << 30)).unwrap();
        let path = device.path().to_path_buf();
        let mut queue = Queue::of(vec![device]);
        let mut spare = Vec::new();
        for row in 0..40 {
            queue.push(ready(row, 0), &mut spare).unwrap();
        }
        queue.sync(&mut spare).unwrap();
        assert_eq!(spare.len(), 40);
        assert_eq!(fs::metadata(&path).unwrap().len(), 40 * CELL_BYTES as u64);
        // A queue that is dropped writes nothing later.
        queue.push(ready(40, 0), &mut spare).unwrap();
        let devices = queue.take_devices();
        for row in 0..41 {
            assert_eq!(devices[0].peek(row).unwrap().unwrap().row, row);
        }
    }

    #[test]
    fn nothing_is_durable_after_a_row_that_was_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let device = Device::create(folder.path(), "rows", Some(1 << 30)).unwrap();
        let mut queue = Queue::of(vec![device]);
        let mut spare = Vec::new();
        // There is no second device.
        let pushed = (0..20).map(|row| queue.push(ready(row, 1), &mut spare));
        assert!(pushed.collect::<Result<Vec<_>, _>>().is_err() || queue.sync(&mut spare).is_err());
        let again = queue.sync(&mut spare);
        assert!(matches!(again, Err(WriteError::Failed)), "{again:?}");
        let later = queue.push(ready(30, 0), &mut spare);
        assert!(matches!(later, Err(WriteError::Failed)), "{later:?}");
    }
}
