//! Safetensors files: tensors under names, read one by one from where they lie, written without a second copy.
//!
//! A file is 8 bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), and the
//! tensors' bytes, little-endian and without gaps (<https://github.com/huggingface/safetensors>, format 0.3).

use crate::atomic::{about, message};
use crate::json;
use candle_core::{bail, DType, Device, Error, Result, Tensor, WithDType};
use half::{bf16, f16};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::Dtype;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Bytes converted at a time.
const PIECE: usize = 1 << 16;

/// A file of which only the header has been read.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: Mutex<File>,
    /// Where the tensors' bytes begin.
    start: u64,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Reads and checks the header: that tensors have the sizes of their shapes and fill the file exactly.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| about(path, e))?;
        let length = file.metadata().map_err(|e| about(path, e))?.len();
        let (start, tensors) = read_header(&file, length).map_err(|e| about(path, e))?;
        Ok(Self {
            path: path.to_path_buf(),
            file: Mutex::new(file),
            start,
            tensors,
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.tensors
    }

    /// Reads one tensor and converts it. A number that `dtype` cannot hold is an error.
    pub fn read(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(info) = self.tensors.get(name) else {
            bail!("{}: there is no {name}", self.path.display())
        };
        let read = || {
            let tensor = self.decode(info)?;
            let converted = tensor.to_dtype(dtype)?;
            refuse_overflow(&tensor, &converted)?;
            converted.to_device(device)
        };
        read().map_err(|e| about(&self.path, format!("{name}: {}", message(&e))))
    }

    /// Up to `count` of a tensor's bytes, from the byte `from` on.
    pub fn bytes(&self, info: &TensorInfo, from: u64, count: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.at(info, from, |mut stored| {
            Ok(stored.by_ref().take(count).read_to_end(&mut bytes)?)
        });
        read.map_err(|e| about(&self.path, e))?;
        Ok(bytes)
    }

    fn decode(&self, info: &TensorInfo) -> Result<Tensor> {
        self.at(info, 0, |stored| decode_tensor(info, stored))
    }

    /// Gives a tensor's bytes from one on to `read`.
    fn at<T>(
        &self,
        info: &TensorInfo,
        from: u64,
        read: impl FnOnce(io::Take<&mut File>) -> Result<T>,
    ) -> Result<T> {
        // Whoever held the lock and panicked left nothing behind but a place in the file, which is set anew here.
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let (begin, end) = info.data_offsets;
        let from = (begin as u64).saturating_add(from);
        file.seek(SeekFrom::Start(self.start.saturating_add(from)))?;
        read((&mut *file).take((end as u64).saturating_sub(from)))
    }
}

fn decode_tensor(info: &TensorInfo, bytes: impl Read) -> Result<Tensor> {
    let shape = info.shape.as_slice();
    match info.dtype {
        Dtype::F64 => decode(bytes, shape, f64::from_le_bytes),
        Dtype::F32 => decode(bytes, shape, f32::from_le_bytes),
        Dtype::F16 => decode(bytes, shape, f16::from_le_bytes),
        Dtype::BF16 => decode(bytes, shape, bf16::from_le_bytes),
        Dtype::U8 => decode(bytes, shape, u8::from_le_bytes),
        Dtype::U32 => decode(bytes, shape, u32::from_le_bytes),
        Dtype::I64 => decode(bytes, shape, i64::from_le_bytes),
        other => bail!("dtype {other} is not supported"),
    }
}

/// Whether numbers are stored in a way that weights may have.
pub(crate) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

/// Where the data begin, and what they are.
fn read_header(mut file: &File, length: u64) -> Result<(u64, BTreeMap<String, TensorInfo>)> {
    let mut size = [0; 8];
    if length < 8 {
        bail!("{length} bytes are no safetensors file")
    }
    file.read_exact(&mut size)?;
    if &size == b"version " {
        bail!("a Git LFS pointer in place of the tensors; `git lfs pull` fetches them")
    }
    let size = u64::from_le_bytes(size);
    if size > json::LONGEST || size > length - 8 {
        bail!("a header of {size} bytes does not fit a file of {length}")
    }
    let mut header = vec![0; size as usize];
    file.read_exact(&mut header)?;
    let header =
        json::parse(&header).map_err(|e| Error::msg(format!("header: {}", message(&e))))?;
    let metadata: Metadata =
        serde_json::from_value(header).map_err(|e| Error::msg(format!("header: {e}")))?;
    let (start, data) = (8 + size, metadata.data_len() as u64);
    if start.checked_add(data) != Some(length) {
        bail!(
            "the header tells of {data} bytes of tensors, but {} follow it",
            length - start
        )
    }
    let tensors = metadata.tensors().into_iter();
    Ok((
        start,
        tensors.map(|(name, info)| (name, info.clone())).collect(),
    ))
}

fn decode<T: WithDType, const N: usize>(
    mut bytes: impl Read,
    shape: &[usize],
    number: fn([u8; N]) -> T,
) -> Result<Tensor> {
    let mut values = Vec::with_capacity(shape.iter().product());
    let mut piece = vec![0; PIECE];
    loop {
        let filled = fill(&mut bytes, &mut piece)?;
        let (numbers, _) = piece[..filled].as_chunks::<N>();
        values.extend(numbers.iter().map(|bytes| number(*bytes)));
        if filled < PIECE {
            return Tensor::from_vec(values, shape, &Device::Cpu);
        }
    }
}

/// Reads until the piece is full or the bytes end.
fn fill(bytes: &mut impl Read, piece: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < piece.len() {
        match bytes.read(&mut piece[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(filled)
}

/// Bytes of a tensor's numbers as they are stored.
pub(crate) fn stored_bytes(tensor: &Tensor, dtype: Option<DType>) -> u64 {
    let size = dtype.unwrap_or(tensor.dtype()).size_in_bytes();
    tensor.elem_count() as u64 * size as u64
}

/// Writes a whole file, each tensor converted to `dtype` where one is given.
pub(crate) fn write_tensors<'a>(
    out: &mut dyn Write,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    dtype: Option<DType>,
) -> Result<()> {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    let stored = |tensor: &Tensor| dtype.unwrap_or(tensor.dtype());
    // Wide numbers first, so that each stands at a multiple of its width.
    tensors.sort_by_key(|(name, tensor)| (usize::MAX - stored(tensor).size_in_bytes(), *name));
    let mut end = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for (name, tensor) in &tensors {
        let start = end;
        end += stored_bytes(tensor, dtype) as usize;
        let info = TensorInfo {
            dtype: stored(tensor).into(),
            shape: tensor.dims().to_vec(),
            data_offsets: (start, end),
        };
        infos.push((name.to_string(), info));
    }
    // transformers wants to be told so.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let metadata = Metadata::new(Some(format), infos).map_err(Error::wrap)?;
    let mut header = serde_json::to_vec(&metadata).map_err(Error::wrap)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    for (name, tensor) in tensors {
        encode_tensor(out, tensor, stored(tensor))
            .map_err(|e| Error::msg(format!("{name}: {}", message(&e))))?;
    }
    Ok(())
}

fn encode_tensor(out: &mut dyn Write, tensor: &Tensor, dtype: DType) -> Result<()> {
    let flat = tensor.flatten_all()?;
    let converted = flat.to_dtype(dtype)?;
    refuse_overflow(&flat, &converted)?;
    match dtype {
        DType::F64 => encode(out, &converted, f64::to_le_bytes),
        DType::F32 => encode(out, &converted, f32::to_le_bytes),
        DType::F16 => encode(out, &converted, f16::to_le_bytes),
        DType::BF16 => encode(out, &converted, bf16::to_le_bytes),
        DType::U8 => encode(out, &converted, u8::to_le_bytes),
        DType::U32 => encode(out, &converted, u32::to_le_bytes),
        DType::I64 => encode(out, &converted, i64::to_le_bytes),
        other => bail!("dtype {other:?} is not supported"),
    }
}

/// f16 ends at 65504, f32 and bf16 at 3e38.
fn refuse_overflow(from: &Tensor, to: &Tensor) -> Result<()> {
    let (wide, narrow) = (from.dtype(), to.dtype());
    let floats = wide.is_float() && narrow.is_float();
    let narrows = wide != narrow && narrow.size_in_bytes() <= wide.size_in_bytes();
    if !floats || !narrows || wide == DType::F16 {
        return Ok(());
    }
    let (from, to) = (from.flatten_all()?, to.flatten_all()?);
    let count = from.elem_count();
    for start in (0..count).step_by(PIECE) {
        let piece = |x: &Tensor| -> Result<Vec<f64>> {
            let x = x.narrow(0, start, PIECE.min(count - start))?;
            x.to_dtype(DType::F64)?.to_vec1()
        };
        let mut pairs = piece(&from)?.into_iter().zip(piece(&to)?);
        if let Some((lost, _)) = pairs.find(|(a, b)| a.is_finite() && !b.is_finite()) {
            bail!("{lost} is beyond {narrow:?}")
        }
    }
    Ok(())
}

fn encode<T: WithDType, const N: usize>(
    out: &mut dyn Write,
    flat: &Tensor,
    bytes: fn(T) -> [u8; N],
) -> Result<()> {
    let values = flat.to_device(&Device::Cpu)?.to_vec1::<T>()?;
    let mut piece = Vec::with_capacity(PIECE);
    for values in values.chunks(PIECE / N) {
        piece.clear();
        values.iter().for_each(|value| piece.extend(bytes(*value)));
        out.write_all(&piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::atomic::write_file;

    fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        bytes
    }

    fn open(bytes: &[u8]) -> Result<TensorFile> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("t.safetensors");
        std::fs::write(&path, bytes)?;
        TensorFile::open(&path)
    }

    #[test]
    fn written_tensors_of_every_dtype_are_read_back_bit_for_bit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        // Longer than a piece, and not a multiple of one.
        let count = PIECE + 3;
        let values: Vec<f64> = (0..count)
            .map(|i| (i as f64 * 0.37).sin() * 50. + 100.)
            .collect();
        let values = Tensor::from_vec(values, (count,), &Device::Cpu).unwrap();
        let dtypes = [
            DType::U8,
            DType::U32,
            DType::I64,
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::F64,
        ];
        let tensors: Vec<_> = dtypes
            .iter()
            .map(|dtype| (format!("{dtype:?}"), values.to_dtype(*dtype).unwrap()))
            .collect();
        let empty = Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
        let mut file = File::create(&path).unwrap();
        let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        write_tensors(&mut file, named.chain([("empty", &empty)]), None).unwrap();
        let file = TensorFile::open(&path).unwrap();
        for (name, tensor) in &tensors {
            let read = file.read(name, tensor.dtype(), &Device::Cpu).unwrap();
            let bits = |x: &Tensor| x.to_dtype(DType::F64).unwrap().to_vec1::<f64>().unwrap();
            assert_eq!(bits(&read), bits(tensor), "{name}");
        }
        let read = file.read("empty", DType::F32, &Device::Cpu).unwrap();
        assert_eq!(read.dims(), [0, 3]);
        // What candle reads is the same.
        let candle = candle_core::safetensors::load(&path, &Device::Cpu).unwrap();
        assert_eq!(candle.len(), tensors.len() + 1);
        let ours = file.read("F32", DType::F32, &Device::Cpu).unwrap();
        assert_eq!(
            ours.to_vec1::<f32>().unwrap(),
            candle["F32"].to_vec1::<f32>().unwrap()
        );
    }

    #[test]
    fn header_that_does_not_fit_the_file_is_refused() {
        let a = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        assert!(open(&file_of(a, &[0; 8])).is_ok());
        let entry = |shape: &str, from: u64, to: u64| {
            format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[{from},{to}]}}}}"#)
        };
        let two = |b: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}},"{b}"#)
                + r#"":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#
        };
        let mut endless = file_of(a, &[0; 8]);
        endless[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        let mut long = file_of(a, &[0; 8]);
        long[..8].copy_from_slice(&(a.len() as u64 + 9).to_le_bytes());
        for (bytes, expected) in [
            (vec![], "0 bytes"),
            (vec![0; 7], "7 bytes"),
            (endless, "18446744073709551615"),
            (long, "does not fit"),
            (file_of(a, &[0; 7]), "8 bytes of tensors, but 7"),
            (file_of(a, &[0; 9]), "8 bytes of tensors, but 9"),
            (file_of("", &[]), "JSON"),
            (file_of("[]", &[]), "header"),
            (file_of(&entry("[2]", 8, 0), &[0; 8]), "offset"),
            (file_of(&entry("[2]", 4, 12), &[0; 12]), "offset"),
            (file_of(&entry("[3]", 0, 8), &[0; 8]), "invalid shape"),
            (
                file_of(&entry("[4611686018427387905,4]", 0, 4), &[0; 4]),
                "overflow",
            ),
            (file_of(&entry("[-1]", 0, 4), &[0; 4]), "header"),
            (file_of(&two("a"), &[0; 8]), "given twice"),
            (file_of(&two("b"), &[0; 8]), "offset"),
            (file_of(&"[".repeat(100_000), &[]), "JSON"),
        ] {
            let error = open(&bytes).unwrap_err().to_string();
            assert!(
                error.contains(expected),
                "{error} does not tell of {expected}"
            );
            assert!(error.contains("t.safetensors"), "{error}");
        }
    }

    #[test]
    fn tensor_of_an_unsupported_dtype_is_refused_by_name() {
        let header = r#"{"a":{"dtype":"I8","shape":[2],"data_offsets":[0,2]}}"#;
        let file = open(&file_of(header, &[0; 2])).unwrap();
        let error = file
            .read("a", DType::F32, &Device::Cpu)
            .unwrap_err()
            .to_string();
        assert!(error.contains("a: dtype I8"), "{error}");
        assert!(file.read("b", DType::F32, &Device::Cpu).is_err());
    }

    #[test]
    fn number_beyond_f16_is_refused() {
        let write = |value: f32| {
            let tensor = Tensor::new(&[1f32, -value], &Device::Cpu)?;
            write_tensors(&mut Vec::new(), [("a", &tensor)], Some(DType::F16))
        };
        assert!(write(65504.).is_ok());
        assert!(write(f32::INFINITY).is_ok());
        let error = write(7e4).unwrap_err().to_string();
        assert!(error.contains("a: -70000 is beyond F16"), "{error}");
        // Numbers that are none beside it do not hide it.
        for first in [f32::NAN, f32::INFINITY, 1.] {
            for values in [[first, 7e4], [7e4, first]] {
                let tensor = Tensor::new(&values, &Device::Cpu).unwrap();
                let written = write_tensors(&mut Vec::new(), [("a", &tensor)], Some(DType::F16));
                let error = written.unwrap_err().to_string();
                assert!(error.contains("a: 70000 is beyond F16"), "{error}");
            }
        }
    }

    #[test]
    fn number_beyond_what_is_asked_for_is_refused_when_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let values = Tensor::new(&[0f64, f64::INFINITY, -7e4, 1e39], &Device::Cpu).unwrap();
        write_file(&path, |out| write_tensors(out, [("a", &values)], None)).unwrap();
        let file = TensorFile::open(&path).unwrap();
        let read = |dtype| file.read("a", dtype, &Device::Cpu);
        assert!(read(DType::F64).is_ok());
        for (dtype, part) in [
            (DType::F32, "is beyond F32"),
            (DType::BF16, "is beyond BF16"),
            (DType::F16, "a: -70000 is beyond F16"),
        ] {
            let error = message(&read(dtype).unwrap_err());
            assert!(error.contains(part), "{error}");
            assert!(error.contains("t.safetensors"), "{error}");
        }
    }
}
